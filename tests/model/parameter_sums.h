// SPDX-License-Identifier: Apache-2.0
// Sums of gradients that their parameters' dtype does not hold.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "espalier/model/gradient_accumulation.h"
#include "espalier/ops/gemm/matrix_product.h"

namespace espalier::testing {

/// 257 rows of ones give weight and bias gradients of 257, which bfloat16 rounds to 256, and a second pass
/// 514: exactly so in the sums. Not in those of weights where products are LibTorch's
/// (detail::rounds_products).
inline void expect_unrounded_sums(at::Device device) {
  constexpr int64_t kRows = 257, kIn = 8, kOut = 16;
  const auto options = at::TensorOptions(device).dtype(at::kBFloat16);
  const at::Tensor weight = at::ones({kOut, kIn}, options).requires_grad_();
  const at::Tensor bias = at::ones({kOut}, options).requires_grad_();
  for (int pass = 1; pass <= 2; ++pass) {
    const at::Tensor x = at::ones({kRows, kIn}, options).requires_grad_();
    const at::Tensor out = accumulating::linear(x, {weight, bias});
    torch::autograd::backward({out}, {at::ones_like(out)});
    for (const at::Tensor& parameter : {weight, bias}) {
      if (parameter.dim() == 2 && detail::rounds_products(parameter)) continue;
      const at::Tensor expected = at::full(parameter.sizes(), static_cast<double>(kRows * pass), at::kFloat);
      EXPECT_TRUE(parameter.grad().cpu().equal(expected)) << parameter.sizes() << ", pass " << pass;
    }
    EXPECT_TRUE(x.grad().cpu().equal(at::full({kRows, kIn}, static_cast<double>(kOut), at::kBFloat16)));
  }
}

}  // namespace espalier::testing
