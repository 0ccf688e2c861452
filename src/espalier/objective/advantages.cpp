// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/advantages.h"

#include <cmath>
#include <map>
#include <string>

#include "espalier/base/check.h"

namespace espalier {

Advantages::Advantages(const Trajectories& trajectories, bool scale_rewards) : trajectories_(&trajectories) {
  struct Group {
    int64_t count = 0;
    double mean = 0;
    double squares = 0;  // sum of squared distances from the mean (Welford)
  };
  std::map<std::string, Group> groups;
  const auto from_reward = [&](int64_t row) {
    return trajectories.reward.has(row) && !trajectories.group_id.empty() &&
           !trajectories.group_id[row].empty();
  };
  bool needed = false;
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    if (from_reward(row)) {
      Group& group = groups[trajectories.group_id[row]];
      const double distance = trajectories.reward.values[row] - group.mean;
      group.mean += distance / static_cast<double>(++group.count);
      group.squares += distance * (trajectories.reward.values[row] - group.mean);
    }
    if (!trajectories.advantages.has(row)) {
      needed = true;
      ESPALIER_CHECK(from_reward(row),
                     "trajectory {} (row {}): objective grpo expects `advantages`, `advantage`, or `reward` "
                     "with `group_id`; "
                     "received none of them",
                     trajectories.name(row), row);
    }
  }
  if (!needed) return;
  from_reward_.resize(trajectories.num_rows());
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    if (!from_reward(row)) continue;
    const Group& group = groups[trajectories.group_id[row]];
    double advantage = trajectories.reward.values[row] - group.mean;
    if (scale_rewards) {
      const double deviation =
          group.count > 1 ? std::sqrt(group.squares / static_cast<double>(group.count - 1)) : 0.0;
      advantage /= deviation + 1e-6;
    }
    from_reward_[row] = advantage;
  }
}

double Advantages::at(int64_t row, int64_t position) const {
  if (trajectories_->advantages.has(row)) {
    return trajectories_->advantages.values[trajectories_->offsets[row] + position];
  }
  return from_reward_[row];
}

}  // namespace espalier
