// SPDX-License-Identifier: Apache-2.0
// The mixture of experts of a decoder layer: a router, experts, and experts that every token passes.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "espalier/config/moe_spec.h"
#include "espalier/model/layers/dense_mlp.h"
#include "espalier/model/layers/parameters.h"

namespace espalier {

class MoeMlp {
 public:
  MoeMlp(const MoeSpec& spec, const NamedParameters& parameters, const NamedParameters& buffers);

  /// [R, hidden_size] -> [R, hidden_size]. The router computes in float32 (float64).
  at::Tensor forward(const at::Tensor& input) const;

 private:
  MoeSpec spec_;
  at::Tensor gate_;                            // [num_experts, hidden_size]
  std::optional<at::Tensor> correction_bias_;  // [num_experts]
  std::vector<DenseMlp> experts_;
  std::optional<DenseMlp> shared_experts_;
};

}  // namespace espalier
