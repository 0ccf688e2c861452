// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/layers/clamped_experts.h"

#include "espalier/ops/elementwise/activations.h"

namespace espalier {
namespace {

accumulating::StackedProjections stacked(const NamedParameters& parameters, const std::string& name) {
  return {parameters.at(name), parameters.at(name + "_bias")};
}

}  // namespace

ClampedExperts::ClampedExperts(const ClampedSwiglu& activation, const NamedParameters& parameters)
    : activation_(activation),
      gate_up_(stacked(parameters, "mlp.experts.gate_up_proj")),
      down_(stacked(parameters, "mlp.experts.down_proj")) {}

at::Tensor ClampedExperts::forward(int64_t expert, const at::Tensor& input) const {
  const at::Tensor inner = accumulating::stacked_linear(input, gate_up_, expert);
  const auto [alpha, limit] = activation_;
  return accumulating::stacked_linear(clamped_swiglu(inner, alpha, limit), down_, expert);
}

}  // namespace espalier
