// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/layers/dense_mlp.h"

#include <ATen/record_function.h>

#include "espalier/ops/elementwise/elementwise.h"

namespace espalier {

DenseMlp::DenseMlp(const NamedParameters& parameters, const std::string& name)
    : gate_(parameters.projection(name + ".gate_proj")),
      up_(parameters.projection(name + ".up_proj")),
      down_(parameters.projection(name + ".down_proj")) {}

at::Tensor DenseMlp::forward(const at::Tensor& input) const {
  RECORD_USER_SCOPE("mlp");
  const std::vector<at::Tensor> inner = accumulating::linears(input, {gate_, up_});
  return accumulating::linear(swiglu(inner[0], inner[1]), down_);
}

}  // namespace espalier
