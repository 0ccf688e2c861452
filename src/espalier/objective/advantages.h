// SPDX-License-Identifier: Apache-2.0
// Advantages: as the data give them, or made of rewards.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/data/trajectories.h"

namespace espalier {

/// Advantages of all trajectories for grpo. A row's own advantages win; otherwise they come from its reward:
/// (reward - mean of its group) / (standard deviation of its group + 1e-6), with the n - 1 standard deviation
/// (DeepSeekMath, 2024, section 4.1.2), 0 in a group of one; without the division when scale_rewards is off
/// (Dr. GRPO, 2025). Groups are those of the whole file. Throws InputError naming a row that has neither.
class Advantages {
 public:
  Advantages() = default;
  Advantages(const Trajectories& trajectories, bool scale_rewards);

  double at(int64_t row, int64_t position) const;

 private:
  const Trajectories* trajectories_ = nullptr;
  std::vector<double> from_reward_;  // [R], or empty when every row has its own
};

}  // namespace espalier
