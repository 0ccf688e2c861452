// SPDX-License-Identifier: Apache-2.0
// An objective of a few terms that a test writes down.
#pragma once

#include <string>
#include <vector>

#include "espalier/objective/objective.h"

namespace espalier::testing {

struct Policy {
  double logprob, advantage, old_logprob;
  bool has_old;
  double coefficient;
  double ref_logprob = -1;
  int64_t trajectory = 0;  // ascending from 0
  double weight = 1;
  double chosen = -1;
  int64_t pair = 0;  // of the trajectory, from 0
};

struct Result {
  ObjectiveValue value;
  std::vector<Metric> metrics;
  std::vector<double> gradient;

  double loss() const;
  double metric(const std::string& name) const;
};

/// Value and gradient; expects that the plain form, which verify trains with, gives the same ones.
Result evaluate(const ObjectiveOptions& options, const std::vector<Policy>& terms);

/// The same without that expectation.
Result evaluate_alone(const ObjectiveOptions& options, const std::vector<Policy>& terms);

/// Expects that the gradient is what differences of values say.
void expect_finite_differences(const ObjectiveOptions& options, std::vector<Policy> terms);

}  // namespace espalier::testing
