// SPDX-License-Identifier: Apache-2.0
// Statistics of rewards and advantages, computed before training.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "espalier/objective/loss.h"

namespace espalier {

/// Mean, population standard deviation and range; all 0 if count is 0.
struct Moments {
  int64_t count = 0;
  double mean = 0, deviation = 0, least = 0, most = 0;
};

struct Signal {
  Moments reward;      // over the trajectories that have one, minus KL penalties (reward_of)
  Moments advantage;   // over the tokens with loss
  int64_t groups = 0;  // named groups with loss
  int64_t groups_of_one = 0;
  int64_t groups_without_signal = 0;  // all advantages are 0 because all rewards are equal
};

/// The signal of these rows, for objectives that read advantages.
Signal signal_of(const Loss& loss, std::span<const int64_t> rows);

/// The same as metrics of a step: reward_{mean, std, min, max} if there are rewards; advantage_{mean, std,
/// min, max}; groups and groups_without_signal if there are groups. Empty for objectives without advantages.
std::vector<std::pair<std::string, double>> signal_metrics(const Loss& loss, std::span<const int64_t> rows);

/// Warnings about the signal of all rows, such as advantages that are all 0, and truncation_warnings.
std::vector<std::string> signal_warnings(const Loss& loss);

/// Of rows whose tokens were chosen among fewer than all (temperature 0, top_k, top_p), if the objective has
/// a ratio to the policy that sampled them.
std::vector<std::string> truncation_warnings(const Trajectories& trajectories, const Objective& objective);

}  // namespace espalier
