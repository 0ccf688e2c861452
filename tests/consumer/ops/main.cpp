// SPDX-License-Identifier: Apache-2.0
// Attention on a root and two leaves: the gradient of the values says who has read them.
#include <ATen/ATen.h>

#include <cstdio>

#include "espalier/ops/attention/tree_attention.h"

int main() {
  const at::Tensor q = at::ones({3, 1, 8}), k = at::ones({3, 1, 8});
  const at::Tensor v = at::ones({3, 1, 8}).requires_grad_();
  const at::Tensor ends = at::tensor({3, 2, 3}, at::kInt);
  espalier::tree_attention(q, k, v, {ends}, {1.0}, {}).select(2, 0).sum().backward();
  for (int token = 0; token < 3; ++token) std::printf("%g ", v.grad()[token][0][0].item<double>());
  std::printf("\n");
}
