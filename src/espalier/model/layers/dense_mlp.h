// SPDX-License-Identifier: Apache-2.0
// The MLP of a decoder layer.
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
  bool gated_;
  std::vector<accumulating::Projection> in_;  // gate and up, or both fused, or up
  accumulating::Projection down_;
};

}  // namespace espalier
