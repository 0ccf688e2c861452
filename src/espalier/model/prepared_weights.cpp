// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/prepared_weights.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "espalier/ops/gemm/matrix_product.h"

namespace espalier::accumulating {

const detail::PreparedWeight* prepared(const at::Tensor& weight) {
  auto* kept = PreparedWeights::find();
  if (kept == nullptr) return nullptr;
  return &kept->get(weight, [&] { return detail::PreparedWeight(weight.detach()); });
}

at::Tensor head_logits(const at::Tensor& hidden, const at::Tensor& weight) {
  const at::NoGradGuard no_grad;
  if (const detail::PreparedWeight* ready = prepared(weight)) return ready->unrounded(hidden);
  return detail::unrounded_product(hidden, weight.t());
}

}  // namespace espalier::accumulating
