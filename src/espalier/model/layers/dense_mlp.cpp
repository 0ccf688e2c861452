// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/layers/mlps.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include "espalier/ops/elementwise/activations.h"
#include "espalier/ops/elementwise/elementwise.h"

namespace espalier {

DenseMlp::DenseMlp(const NamedParameters& parameters, const DenseMlpSpec& spec)
    : activation_(spec.activation),
      gated_(spec.names.gated()),
      down_(parameters.projection(spec.name + "." + spec.names.down)) {
  for (const std::string& name : {spec.names.gate, spec.names.up}) {
    if (!name.empty()) in_.push_back(parameters.projection(spec.name + "." + name));
  }
}

at::Tensor DenseMlp::forward(const at::Tensor& input) const {
  RECORD_USER_SCOPE("mlp");
  std::vector<at::Tensor> inner = accumulating::linears(input, in_);
  if (!gated_) return accumulating::linear(at::relu(inner[0]).square(), down_);
  if (inner.size() == 1) inner = inner[0].chunk(2, -1);
  const bool is_silu = activation_ == Activation::kSilu;
  return accumulating::linear((is_silu ? swiglu : geglu)(inner[0], inner[1]), down_);
}

}  // namespace espalier
