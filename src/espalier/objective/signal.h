// SPDX-License-Identifier: Apache-2.0
// What rewards and advantages say about the data, before anything is trained.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "espalier/objective/loss.h"

namespace espalier {

/// Mean, standard deviation (that of the numbers themselves: over n) and range; 0 of no numbers.
struct Moments {
  int64_t count = 0;
  double mean = 0, deviation = 0, least = 0, most = 0;
};

struct Signal {
  Moments reward;      // over the trajectories that have one, less penalties (reward_of)
  Moments advantage;   // over the tokens with loss
  int64_t groups = 0;  // named groups with loss
  int64_t groups_of_one = 0;
  int64_t groups_without_signal = 0;  // all advantages 0: all their rewards are alike
};

/// Of these rows of the data, for objectives that read advantages.
Signal signal_of(const Loss& loss, std::span<const int64_t> rows);

/// The same as metrics of a step: reward_mean, reward_std, reward_min, reward_max where there are rewards;
/// advantage_mean, advantage_std, advantage_min, advantage_max; groups and groups_without_signal where there
/// are groups. Empty for objectives without advantages.
std::vector<std::pair<std::string, double>> signal_metrics(const Loss& loss, std::span<const int64_t> rows);

/// What is worth a warning in the rows of the data together.
std::vector<std::string> signal_warnings(const Loss& loss);

}  // namespace espalier
