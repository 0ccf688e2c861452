// SPDX-License-Identifier: Apache-2.0
// The experts of gpt_oss: down(clamped_swiglu(gate_up(x))) with biases, each fused over the experts of a
// layer.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "espalier/config/moe_spec.h"
#include "espalier/model/layers/parameters.h"

namespace espalier {

class ClampedExperts {
 public:
  /// Uses the parameters mlp.experts.gate_up_proj, mlp.experts.down_proj and their biases.
  ClampedExperts(const ClampedSwiglu& activation, const NamedParameters& parameters);

  /// One expert: [R, hidden_size] -> [R, hidden_size]
  at::Tensor forward(int64_t expert, const at::Tensor& input) const;

 private:
  ClampedSwiglu activation_;
  accumulating::StackedProjections gate_up_, down_;
};

}  // namespace espalier
