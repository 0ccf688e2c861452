// SPDX-License-Identifier: Apache-2.0
// A loss that the caller computes, as plain numbers.
#pragma once

#include <functional>
#include <span>
#include <vector>

namespace espalier {

/// What the caller's function says of all terms of a step.
struct CustomValue {
  double loss = 0;
  std::vector<double> gradient;  // [M]: the derivative of the loss in each log-probability
};

/// Is given the log-probabilities [M] of all terms of the step: trajectory by trajectory, each ascending by
/// position. It is called once for a step, on the thread that runs the step.
using CustomFunction = std::function<CustomValue(std::span<const double> logprobs)>;

}  // namespace espalier
