// SPDX-License-Identifier: Apache-2.0
// The MLP of a decoder layer: dense, or a mixture of experts with a router and optional shared experts.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "espalier/config/layer_spec.h"
#include "espalier/model/layers/parameters.h"
#include "espalier/model/router_statistics.h"
#include "espalier/ops/moe/moe.h"

namespace espalier {

class DenseMlp {
 public:
  DenseMlp(const NamedParameters& parameters, const DenseMlpSpec& spec);

  /// [R, hidden_size] -> [R, hidden_size]
  at::Tensor forward(const at::Tensor& input) const;

 private:
  Activation activation_;
  bool gated_;
  std::vector<accumulating::Projection> in_;  // gate and up, or both fused, or up
  accumulating::Projection down_;
};

/// The position of a router in a model.
struct RouterPlace {
  int64_t router = 0;  // index among the routers
  int64_t layer = 0;   // index among the layers
  int64_t num_routers = 1;
};

class MoeMlp {
 public:
  MoeMlp(const MoeSpec& spec, const NamedParameters& parameters, const NamedParameters& buffers,
         const RouterPlace& place);

  /// [R, hidden_size] -> [R, hidden_size]. The router computes in float32 (float64). `context`: for these R
  /// tokens.
  at::Tensor forward(const at::Tensor& input, const RouterContext& context) const;

 private:
  std::optional<at::Tensor> given_experts(const at::Tensor& routes) const;

  MoeSpec spec_;
  RouterPlace place_;
  accumulating::Projection router_;            // weight [num_experts, hidden_size]
  std::optional<at::Tensor> correction_bias_;  // [num_experts]
  ExpertFunction experts_;
  std::optional<DenseMlp> shared_experts_;
  std::optional<accumulating::Projection> shared_gate_;  // [1, hidden_size]
};

}  // namespace espalier
