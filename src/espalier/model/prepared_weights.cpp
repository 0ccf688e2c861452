// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/prepared_weights.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <cstdint>
#include <optional>
#include <unordered_map>

#include "espalier/ops/gemm/matrix_product.h"

namespace espalier::accumulating {
namespace {

/// A weight and the state in which it was prepared.
struct Prepared {
  at::Tensor weight;  // keeps its storage alive, so that the address is not reused
  int64_t version = 0;
  std::optional<detail::PreparedWeight> ready;
};
thread_local std::optional<std::unordered_map<const void*, Prepared>> prepared_weights;

}  // namespace

PreparedWeights::PreparedWeights() {
  TORCH_CHECK(!prepared_weights, "PreparedWeights: expected none, received a second one");
  prepared_weights.emplace();
}

PreparedWeights::~PreparedWeights() {
  prepared_weights.reset();
}

const detail::PreparedWeight* prepared(const at::Tensor& weight) {
  if (!prepared_weights) return nullptr;
  Prepared& kept = (*prepared_weights)[weight.const_data_ptr()];
  if (!kept.ready || kept.version != weight._version()) {
    kept = {weight, weight._version(), detail::PreparedWeight(weight.detach())};
  }
  return &*kept.ready;
}

at::Tensor head_logits(const at::Tensor& hidden, const at::Tensor& weight) {
  const at::NoGradGuard no_grad;
  if (const detail::PreparedWeight* ready = prepared(weight)) return ready->unrounded(hidden);
  return detail::unrounded_product(hidden, weight.t());
}

}  // namespace espalier::accumulating
