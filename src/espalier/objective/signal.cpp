// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/signal.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_map>

namespace espalier {
namespace {

/// Computes moments incrementally (Welford).
class MomentSums {
 public:
  void add(double value) {
    moments_.least = moments_.count == 0 ? value : std::min(moments_.least, value);
    moments_.most = moments_.count == 0 ? value : std::max(moments_.most, value);
    const double distance = value - moments_.mean;
    moments_.mean += distance / static_cast<double>(++moments_.count);
    squares_ += distance * (value - moments_.mean);
  }

  Moments moments() const {
    Moments result = moments_;
    if (result.count > 0) result.deviation = std::sqrt(squares_ / static_cast<double>(result.count));
    return result;
  }

 private:
  Moments moments_;
  double squares_ = 0;
};

struct GroupSignal {
  int64_t rows = 0;
  bool has_loss = false, has_signal = false;
};

}  // namespace

Signal signal_of(const Loss& loss, std::span<const int64_t> rows) {
  const Trajectories& trajectories = loss.trajectories();
  MomentSums rewards, advantages;
  std::unordered_map<std::string, GroupSignal> groups;
  for (const int64_t row : rows) {
    if (has_reward(trajectories, row)) {
      rewards.add(reward_of(trajectories, row, loss.objective().options()));
    }
    GroupSignal row_signal{.rows = 1};
    for (int64_t position = 1; position < trajectories.row_size(row); ++position) {
      if (trajectories.loss_weights[trajectories.offsets[row] + position] == 0) continue;
      const double advantage = loss.column(TermColumn::kAdvantage, row, position);
      advantages.add(advantage);
      row_signal.has_loss = true;
      row_signal.has_signal |= advantage != 0;
    }
    if (trajectories.group_id.empty() || trajectories.group_id[row].empty()) continue;
    GroupSignal& group = groups[trajectories.group_id[row]];
    group.rows += row_signal.rows;
    group.has_loss |= row_signal.has_loss;
    group.has_signal |= row_signal.has_signal;
  }
  Signal signal{.reward = rewards.moments(), .advantage = advantages.moments()};
  for (const auto& [name, group] : groups) {
    if (!group.has_loss) continue;
    ++signal.groups;
    signal.groups_of_one += group.rows == 1;
    signal.groups_without_signal += !group.has_signal;
  }
  return signal;
}

std::vector<std::pair<std::string, double>> signal_metrics(const Loss& loss, std::span<const int64_t> rows) {
  std::vector<std::pair<std::string, double>> metrics;
  for (int64_t i = 0; loss.is_mix() && i < loss.num_parts(); ++i) {
    std::vector<int64_t> part_rows;
    for (const int64_t row : rows) {
      if (loss.part_of(row) == i) part_rows.push_back(row - loss.first_row(i));
    }
    for (const auto& [name, value] : signal_metrics(loss.part(i), part_rows)) {
      metrics.emplace_back(fmt::format("{}/{}", name, loss.part_name(i)), value);
    }
  }
  if (loss.is_mix()) return metrics;
  if (!loss.objective().reads(TermColumn::kAdvantage)) return metrics;
  const Signal signal = signal_of(loss, rows);
  const auto add = [&](const char* name, const Moments& moments) {
    if (moments.count == 0) return;
    metrics.emplace_back(fmt::format("{}_mean", name), moments.mean);
    metrics.emplace_back(fmt::format("{}_std", name), moments.deviation);
    metrics.emplace_back(fmt::format("{}_min", name), moments.least);
    metrics.emplace_back(fmt::format("{}_max", name), moments.most);
  };
  add("reward", signal.reward);
  add("advantage", signal.advantage);
  if (signal.groups > 0) {
    metrics.emplace_back("groups", static_cast<double>(signal.groups));
    metrics.emplace_back("groups_without_signal", static_cast<double>(signal.groups_without_signal));
  }
  return metrics;
}

std::vector<std::string> truncation_warnings(const Trajectories& trajectories, const Objective& objective) {
  std::vector<std::string> warnings;
  if (!objective.reads(TermColumn::kOldLogprob)) return warnings;
  int64_t rows = 0;
  double least_top_p = 1;
  bool is_bounded = true;
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    const auto value = [&](const Optional<RealColumn>& column, double absent) {
      return column.has(row) ? column.values[row] : absent;
    };
    const double top_p = value(trajectories.top_p, 1);
    const bool has_top_k = value(trajectories.top_k, 0) > 0 || value(trajectories.temperature, 1) == 0;
    if (!trajectories.logprobs.has(row) || (!has_top_k && top_p == 1)) continue;
    ++rows;
    is_bounded &= !has_top_k;
    least_top_p = std::min(least_top_p, top_p);
  }
  if (rows == 0) return warnings;
  warnings.push_back(fmt::format(
      "{} of {} trajectories {} sampled with temperature 0, top_k or top_p: ratios are those of `logprobs`, "
      "of "
      "all tokens, which are lower than those of the tokens that were left{}",
      rows, trajectories.num_rows(), rows == 1 ? "was" : "were",
      is_bounded ? fmt::format(", by {:.3g} nats at most", -std::log(least_top_p))
                 : ", by as much as `espalier sample` says"));
  return warnings;
}

std::vector<std::string> signal_warnings(const Loss& loss) {
  std::vector<std::string> warnings = truncation_warnings(loss.trajectories(), loss.objective());
  if (!loss.objective().reads(TermColumn::kAdvantage)) return warnings;
  std::vector<int64_t> rows(loss.trajectories().num_rows());
  std::iota(rows.begin(), rows.end(), 0);
  const Signal signal = signal_of(loss, rows);
  if (signal.advantage.count > 0 && signal.advantage.least == 0 && signal.advantage.most == 0) {
    warnings.push_back(fmt::format("all advantages are 0: objective {} trains nothing{}",
                                   loss.objective().name(),
                                   signal.groups > 0 ? " (rewards are alike in every group)" : ""));
    return warnings;
  }
  const Baseline baseline = loss.objective().options().baseline;
  const bool compares = baseline == Baseline::kMean || baseline == Baseline::kLeaveOneOut;
  if (compares && signal.reward.count > 0 && signal.groups_of_one > 0) {
    warnings.push_back(
        fmt::format("{} of {} groups {} only one trajectory: an advantage from its reward is 0",
                    signal.groups_of_one, signal.groups, signal.groups_of_one == 1 ? "has" : "have"));
  }
  if (signal.groups_without_signal > 0) {
    warnings.push_back(fmt::format("{} of {} groups {} no signal: all their advantages are 0",
                                   signal.groups_without_signal, signal.groups,
                                   signal.groups_without_signal == 1 ? "has" : "have"));
  }
  return warnings;
}

}  // namespace espalier
