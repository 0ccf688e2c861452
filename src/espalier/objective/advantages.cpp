// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/advantages.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

#include "espalier/base/check.h"
#include "espalier/objective/exponentials.h"

namespace espalier {
namespace {

struct RewardGroup {
  int64_t count = 0;
  double mean = 0;
  double squares = 0;  // sum of squared distances from the mean (Welford)
  double before = 0;   // mean reward of all earlier groups of the file

  void add(double reward) {
    const double distance = reward - mean;
    mean += distance / static_cast<double>(++count);
    squares += distance * (reward - mean);
  }

  double deviation() const { return count > 1 ? std::sqrt(squares / static_cast<double>(count - 1)) : 0.0; }
};

/// The KL penalty of a token, which is subtracted from the reward (kl_in reward).
double penalty(const Trajectories& trajectories, int64_t token, const ObjectiveOptions& options) {
  if (!options.has_kl_in(KlPlace::kReward) || trajectories.loss_weights[token] == 0) return 0;
  const double log_ratio = trajectories.logprobs.values[token] - trajectories.ref_logprobs.values[token];
  return kl_estimate(log_ratio, options.kl_estimator, options.kl_coef);
}

void check_has_penalty(const Trajectories& trajectories, int64_t row, const ObjectiveOptions& options) {
  if (!options.has_kl_in(KlPlace::kReward)) return;
  ESPALIER_CHECK(trajectories.logprobs.has(row) && trajectories.ref_logprobs.has(row),
                 "trajectory {} (row {}): kl-in reward expects `logprobs` and `ref_logprobs`; received {}",
                 trajectories.name(row), row,
                 trajectories.logprobs.has(row)       ? "no `ref_logprobs`"
                 : trajectories.ref_logprobs.has(row) ? "no `logprobs`"
                                                      : "neither of them");
}

/// The values that are compared within a group: the row's reward, or the returns of its turns.
std::vector<double> returns_of(const Trajectories& trajectories, int64_t row,
                               const ObjectiveOptions& options) {
  if (!trajectories.has_turn_rewards(row)) return {reward_of(trajectories, row, options)};
  check_has_penalty(trajectories, row, options);
  const std::vector<int64_t> starts = turn_starts(trajectories, row);
  std::vector<double> returns(starts.size());
  const int64_t first = trajectories.turn_reward_offsets[row], offset = trajectories.offsets[row];
  double later = 0;
  int64_t end = trajectories.row_size(row);
  for (size_t turn = starts.size(); turn-- > 0; end = starts[turn]) {
    double reward = trajectories.turn_rewards[first + static_cast<int64_t>(turn)];
    for (int64_t position = starts[turn]; position < end; ++position) {
      reward -= penalty(trajectories, offset + position, options);
    }
    later = returns[turn] = reward + options.turn_discount * later;
  }
  return returns;
}

/// The rewards of a file by group; a row without a group_id forms a group by itself. The return of a turn is
/// compared with the returns of the same turn in other rows.
class RewardGroups {
 public:
  RewardGroups(const Trajectories& trajectories, const ObjectiveOptions& options)
      : group_of_row_(trajectories.num_rows(), -1) {
    std::map<std::string, int64_t> known;
    for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
      if (has_reward(trajectories, row)) {
        const bool is_named = !trajectories.group_id.empty() && !trajectories.group_id[row].empty();
        const auto next = static_cast<int64_t>(groups_.size());
        group_of_row_[row] =
            is_named ? known.try_emplace(trajectories.group_id[row], next).first->second : next;
        if (group_of_row_[row] == next) groups_.push_back({.has_turns = trajectories.has_turn_rewards(row)});
        add(trajectories, row, returns_of(trajectories, row, options));
      }
      returns_.end_row();
    }
    set_means_before();
  }

  /// One advantage for each turn of the row, or one for the whole row if it has a single reward.
  std::vector<double> advantages(int64_t row, const ObjectiveOptions& options) const {
    std::vector<double> result;
    const auto& turns = groups_[group_of_row_[row]].turns;
    for (const double value : returns_.row(row)) {
      const RewardGroup& group = turns[result.size()];
      const double scale = options.scale_rewards ? group.deviation() + 1e-6 : 1.0;
      result.push_back((value - baseline(group, value, options.baseline)) / scale);
    }
    return result;
  }

 private:
  struct GroupTurns {
    bool has_turns;                    // otherwise the whole trajectory is the only turn
    std::vector<RewardGroup> turns{};  // as many as the longest trajectory of the group has
  };

  void add(const Trajectories& trajectories, int64_t row, const std::vector<double>& returns) {
    GroupTurns& group = groups_[group_of_row_[row]];
    ESPALIER_CHECK(
        group.has_turns == trajectories.has_turn_rewards(row),
        "trajectory {} (row {}): expected `{}`, as the trajectories of its group {} before it have; "
        "received `{}`",
        trajectories.name(row), row, group.has_turns ? "turn_rewards" : "reward", trajectories.group_id[row],
        group.has_turns ? "reward" : "turn_rewards");
    if (group.turns.size() < returns.size()) group.turns.resize(returns.size());
    for (size_t turn = 0; turn < returns.size(); ++turn) group.turns[turn].add(returns[turn]);
    returns_.values.insert(returns_.values.end(), returns.begin(), returns.end());
  }

  void set_means_before() {
    std::vector<RewardGroup> all[2];  // for groups without and with turns
    for (GroupTurns& group : groups_) {
      std::vector<RewardGroup>& accumulated = all[group.has_turns];
      if (accumulated.size() < group.turns.size()) accumulated.resize(group.turns.size());
      for (size_t turn = 0; turn < group.turns.size(); ++turn) {
        RewardGroup &own = group.turns[turn], &so_far = accumulated[turn];
        own.before = so_far.mean;
        const auto together = static_cast<double>(so_far.count + own.count);
        so_far.mean += (own.mean - so_far.mean) * static_cast<double>(own.count) / together;
        so_far.count += own.count;
      }
    }
  }

  static double baseline(const RewardGroup& group, double reward, Baseline baseline) {
    switch (baseline) {
      case Baseline::kMean:
        return group.mean;
      case Baseline::kLeaveOneOut:
        // mean of the others = mean - (reward - mean) / (n - 1)
        return group.count > 1 ? group.mean - (reward - group.mean) / static_cast<double>(group.count - 1)
                               : reward;
      case Baseline::kRunning:
        return group.before;
      case Baseline::kNone:
        return 0;
    }
    throw InternalError("unknown baseline");
  }

  std::vector<int64_t> group_of_row_;  // -1 without a reward
  Csr<double> returns_;                // by row
  std::vector<GroupTurns> groups_;     // in the order of the file
};

/// Whether an advantage can be computed from the row's reward.
bool has_comparable_reward(const Trajectories& trajectories, int64_t row, Baseline baseline) {
  if (!has_reward(trajectories, row)) return false;
  const bool compares = baseline == Baseline::kMean || baseline == Baseline::kLeaveOneOut;
  return !compares || (!trajectories.group_id.empty() && !trajectories.group_id[row].empty());
}

/// Describes what a row has instead of a comparable reward, for the error message.
std::string describe_received(const Trajectories& trajectories, int64_t row) {
  if (!has_reward(trajectories, row)) return "none of them";
  return fmt::format("`{}` without `group_id`, the rows to compare it with (not needed with baseline none)",
                     trajectories.has_turn_rewards(row) ? "turn_rewards" : "reward");
}

}  // namespace

bool has_reward(const Trajectories& trajectories, int64_t row) {
  return trajectories.reward.has(row) || trajectories.has_turn_rewards(row);
}

double reward_of(const Trajectories& trajectories, int64_t row, const ObjectiveOptions& options) {
  check_has_penalty(trajectories, row, options);
  double reward = 0;
  if (trajectories.reward.has(row)) {
    reward = trajectories.reward.values[row];
  } else {
    const int64_t end = trajectories.turn_reward_offsets[row + 1];
    for (int64_t i = trajectories.turn_reward_offsets[row]; i < end; ++i)
      reward += trajectories.turn_rewards[i];
  }
  for (int64_t i = trajectories.offsets[row] + 1; i < trajectories.offsets[row + 1]; ++i) {
    reward -= penalty(trajectories, i, options);
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
    ESPALIER_CHECK(has_comparable_reward(trajectories, row, options.baseline),
                   "trajectory {} (row {}): objective {} expects `advantages`, `advantage`, or `reward` or "
                   "`turn_rewards` with `group_id`; received {}",
                   trajectories.name(row), row, to_string(options.kind),
                   describe_received(trajectories, row));
  }
  if (!needed) return;
  const RewardGroups groups(trajectories, options);
  from_reward_.resize(trajectories.num_rows());
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    const bool is_made = !trajectories.advantages.has(row);
    const std::vector<double> made = is_made ? groups.advantages(row, options) : std::vector<double>();
    if (is_made && !trajectories.has_turn_rewards(row)) from_reward_[row] = made.front();
    if (turn_discount_ == 1 && trajectories.turn_reward_offsets.empty()) continue;
    turns_.push_row(turn_starts(trajectories, row));
    if (trajectories.has_turn_rewards(row))
      turn_advantages_.insert(turn_advantages_.end(), made.begin(), made.end());
    turn_advantages_.resize(turns_.values.size());
  }
}

double Advantages::at(int64_t row, int64_t position) const {
  if (trajectories_->advantages.has(row)) {
    return trajectories_->advantages.values[trajectories_->offsets[row] + position];
  }
  const bool has_turns = trajectories_->has_turn_rewards(row);
  if (turn_discount_ == 1 && !has_turns) return from_reward_[row];
  const auto turns = turns_.row(row);
  const auto next = std::ranges::upper_bound(turns, position) - turns.begin();
  if (has_turns)
    return next == 0 ? 0 : turn_advantages_[turns_.offsets[row] + next - 1];  // no loss before the first turn
  return from_reward_[row] * std::pow(turn_discount_, static_cast<double>(std::ssize(turns) - next));
}

}  // namespace espalier
