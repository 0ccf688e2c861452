// SPDX-License-Identifier: Apache-2.0
// The type of a loss function supplied by the caller.
#pragma once

#include <functional>
#include <span>
#include <vector>

namespace espalier {

/// The result of the caller's function for all terms of a step.
struct CustomValue {
  double loss = 0;
  std::vector<double> gradient;  // [M]: derivative of the loss with respect to each log-probability
};

/// Takes the log-probabilities [M] of all terms of the step, trajectory by trajectory, ascending by position.
/// Called once per step, on the thread that runs the step.
using CustomFunction = std::function<CustomValue(std::span<const double> logprobs)>;

}  // namespace espalier
