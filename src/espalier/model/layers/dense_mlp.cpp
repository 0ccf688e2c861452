// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/layers/dense_mlp.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include "espalier/ops/elementwise/elementwise.h"

namespace espalier {

DenseMlp::DenseMlp(const NamedParameters& parameters, const std::string& name, bool fused)
    : down_(parameters.projection(name + (fused ? ".output_linear" : ".down_proj"))) {
  if (fused) {
    in_ = {parameters.projection(name + ".input_linear")};
  } else {
    in_ = {parameters.projection(name + ".gate_proj"), parameters.projection(name + ".up_proj")};
  }
}

at::Tensor DenseMlp::forward(const at::Tensor& input) const {
  RECORD_USER_SCOPE("mlp");
  std::vector<at::Tensor> inner = accumulating::linears(input, in_);
  if (inner.size() == 1) inner = inner[0].chunk(2, -1);
  return accumulating::linear(swiglu(inner[0], inner[1]), down_);
}

}  // namespace espalier
