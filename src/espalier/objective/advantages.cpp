// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/advantages.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

#include "espalier/base/check.h"
#include "espalier/objective/kl.h"

namespace espalier {
namespace {

struct RewardGroup {
  int64_t count = 0;
  double mean = 0;
  double squares = 0;  // sum of squared distances from the mean (Welford)
  double before = 0;   // mean of the rewards of the groups that stand before it in the file

  void add(double reward) {
    const double distance = reward - mean;
    mean += distance / static_cast<double>(++count);
    squares += distance * (reward - mean);
  }

  double deviation() const { return count > 1 ? std::sqrt(squares / static_cast<double>(count - 1)) : 0.0; }
};

/// The rewards of a file by group; a row without a group_id is a group of its own.
class RewardGroups {
 public:
  RewardGroups(const Trajectories& trajectories, const ObjectiveOptions& options)
      : of_row_(trajectories.num_rows(), -1), rewards_(trajectories.num_rows()) {
    std::map<std::string, int64_t> known;
    for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
      if (!trajectories.reward.has(row)) continue;
      rewards_[row] = reward_of(trajectories, row, options);
      const bool is_named = !trajectories.group_id.empty() && !trajectories.group_id[row].empty();
      const auto next = static_cast<int64_t>(groups_.size());
      of_row_[row] = is_named ? known.try_emplace(trajectories.group_id[row], next).first->second : next;
      if (of_row_[row] == next) groups_.emplace_back();
      groups_[of_row_[row]].add(rewards_[row]);
    }
    RewardGroup all;
    for (RewardGroup& group : groups_) {
      group.before = all.mean;
      const auto together = static_cast<double>(all.count + group.count);
      all.mean += (group.mean - all.mean) * static_cast<double>(group.count) / together;
      all.count += group.count;
    }
  }

  double advantage(int64_t row, const ObjectiveOptions& options) const {
    const RewardGroup& group = groups_[of_row_[row]];
    const double scale = options.scale_rewards ? group.deviation() + 1e-6 : 1.0;
    return (rewards_[row] - baseline(group, rewards_[row], options.baseline)) / scale;
  }

 private:
  static double baseline(const RewardGroup& group, double reward, Baseline baseline) {
    switch (baseline) {
      case Baseline::kMean:
        return group.mean;
      case Baseline::kLeaveOneOut:
        // The mean of the others is as far beyond the group's mean as this leaves for n - 1 of them.
        return group.count > 1 ? group.mean - (reward - group.mean) / static_cast<double>(group.count - 1)
                               : reward;
      case Baseline::kRunning:
        return group.before;
      case Baseline::kNone:
        return 0;
    }
    throw InternalError("unknown baseline");
  }

  std::vector<int64_t> of_row_;  // -1 without a reward
  std::vector<double> rewards_;
  std::vector<RewardGroup> groups_;  // in the order of the file
};

/// Whether the row's reward can be made an advantage.
bool has_reward(const Trajectories& trajectories, int64_t row, Baseline baseline) {
  if (!trajectories.reward.has(row)) return false;
  const bool compares = baseline == Baseline::kMean || baseline == Baseline::kLeaveOneOut;
  return !compares || (!trajectories.group_id.empty() && !trajectories.group_id[row].empty());
}

/// First positions of the row's turns.
void append_turns(const Trajectories& trajectories, int64_t row, Csr<int64_t>* turns) {
  const int64_t begin = trajectories.offsets[row];
  bool inside = false;
  for (int64_t position = 1; position < trajectories.row_size(row); ++position) {
    const bool carries_loss = trajectories.loss_weights[begin + position] > 0;
    if (carries_loss && !inside) turns->values.push_back(position);
    inside = carries_loss;
  }
  turns->end_row();
}

}  // namespace

double reward_of(const Trajectories& trajectories, int64_t row, const ObjectiveOptions& options) {
  double reward = trajectories.reward.values[row];
  if (!options.has_kl_in(KlPlace::kReward)) return reward;
  ESPALIER_CHECK(trajectories.logprobs.has(row) && trajectories.ref_logprobs.has(row),
                 "trajectory {} (row {}): kl-in reward expects `logprobs` and `ref_logprobs`; received {}",
                 trajectories.name(row), row,
                 trajectories.logprobs.has(row)       ? "no `ref_logprobs`"
                 : trajectories.ref_logprobs.has(row) ? "no `logprobs`"
                                                      : "neither of them");
  for (int64_t i = trajectories.offsets[row] + 1; i < trajectories.offsets[row + 1]; ++i) {
    if (trajectories.loss_weights[i] == 0) continue;
    const double log_ratio = trajectories.logprobs.values[i] - trajectories.ref_logprobs.values[i];
    reward -= options.kl_coef * kl_estimate(log_ratio, options.kl_estimator);
  }
  return reward;
}

Advantages::Advantages(const Trajectories& trajectories, const ObjectiveOptions& options)
    : trajectories_(&trajectories), turn_discount_(options.turn_discount) {
  bool needed = false;
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    if (trajectories.advantages.has(row)) {
      ESPALIER_CHECK(!options.has_kl_in(KlPlace::kReward),
                     "trajectory {} (row {}): kl-in reward expects `reward`; received advantages, which it "
                     "cannot change",
                     trajectories.name(row), row);
      continue;
    }
    needed = true;
    ESPALIER_CHECK(has_reward(trajectories, row, options.baseline),
                   "trajectory {} (row {}): objective {} expects `advantages`, `advantage`, or `reward` with "
                   "`group_id`; "
                   "received none of them",
                   trajectories.name(row), row, to_string(options.kind));
  }
  if (!needed) return;
  const RewardGroups groups(trajectories, options);
  from_reward_.resize(trajectories.num_rows());
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    if (!trajectories.advantages.has(row)) from_reward_[row] = groups.advantage(row, options);
    if (turn_discount_ != 1) append_turns(trajectories, row, &turns_);
  }
}

double Advantages::at(int64_t row, int64_t position) const {
  if (trajectories_->advantages.has(row)) {
    return trajectories_->advantages.values[trajectories_->offsets[row] + position];
  }
  if (turn_discount_ == 1) return from_reward_[row];
  const auto turns = turns_.row(row);
  const auto later = turns.end() - std::ranges::upper_bound(turns, position);
  return from_reward_[row] * std::pow(turn_discount_, static_cast<double>(later));
}

}  // namespace espalier
