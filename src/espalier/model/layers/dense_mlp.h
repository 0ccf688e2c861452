// SPDX-License-Identifier: Apache-2.0
// The gated MLP of a decoder layer: down(silu(gate(x)) * up(x)).
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "espalier/model/layers/parameters.h"

namespace espalier {

class DenseMlp {
 public:
  /// Of the parameters NAME.gate_proj, NAME.up_proj and NAME.down_proj.
  DenseMlp(const NamedParameters& parameters, const std::string& name);

  /// [R, hidden_size] -> [R, hidden_size]
  at::Tensor forward(const at::Tensor& input) const;

 private:
  accumulating::Projection gate_, up_, down_;
};

}  // namespace espalier
