// SPDX-License-Identifier: Apache-2.0
// The gated MLP of a decoder layer: down(activation(gate(x)) * up(x)).
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "espalier/config/layer_spec.h"
#include "espalier/model/layers/parameters.h"

namespace espalier {

class DenseMlp {
 public:
  DenseMlp(const NamedParameters& parameters, const DenseMlpSpec& spec);

  /// [R, hidden_size] -> [R, hidden_size]
  at::Tensor forward(const at::Tensor& input) const;

 private:
  Activation activation_;
  std::vector<accumulating::Projection> in_;  // gate and up, or both fused
  accumulating::Projection down_;
};

}  // namespace espalier
