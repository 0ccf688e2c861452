// SPDX-License-Identifier: Apache-2.0
// The arguments of edge_distribution, as the dispatcher hands them on.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace espalier::detail {

struct DistributionArguments {
  const at::Tensor &hidden, &weight, &edge_row, &edge_target;
  const std::optional<at::Tensor>&bias, &edge_temperature;
  double temperature, logit_scale, softcap;
};

/// logprobs, entropy, and in float64 the log-sum-exp of the edges' logits and the logits' mean under p.
using DistributionResults = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using DistributionGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // of hidden, weight and bias

/// Ranks, shapes, dtypes, devices and the numbers; not the values of tensors.
void check_edge_distribution(const DistributionArguments& given);

}  // namespace espalier::detail
