// SPDX-License-Identifier: Apache-2.0
// The gated MLP of a decoder layer: down(silu(gate(x)) * up(x)).
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "espalier/model/layers/parameters.h"

namespace espalier {

class DenseMlp {
 public:
  /// Uses the parameters NAME.gate_proj, NAME.up_proj and NAME.down_proj; if `fused`, NAME.input_linear,
  /// whose first half of rows is gate, and NAME.output_linear.
  DenseMlp(const NamedParameters& parameters, const std::string& name, bool fused);

  /// [R, hidden_size] -> [R, hidden_size]
  at::Tensor forward(const at::Tensor& input) const;

 private:
  std::vector<accumulating::Projection> in_;  // gate and up, or both fused
  accumulating::Projection down_;
};

}  // namespace espalier
