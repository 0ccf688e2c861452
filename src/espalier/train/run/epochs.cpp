// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/run/epochs.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "espalier/base/rng.h"
#include "espalier/train/optimizer/diagnosis.h"

namespace espalier {

namespace {

using Rows = std::vector<int64_t>;

bool compares_pairs(const ObjectiveOptions& objective) {
  return make_objective(objective)->scope() == Scope::kPair;
}

bool compares_pairs(const TrainOptions& options) {
  if (options.mix.empty()) return compares_pairs(options.objective);
  return std::ranges::any_of(options.mix,
                             [](const MixSource& source) { return compares_pairs(source.objective); });
}

// Rows in units that a step must not split, in order of first appearance: groups, unless single rows are
// shuffled, and pairs, if the objective compares them.
std::vector<Rows> whole_units(const Trajectories& trajectories, const TrainOptions& options) {
  const bool keeps_groups = options.shuffle != Shuffle::kRows;
  const std::vector<int64_t> source_of_row = options.mix.empty()
                                                 ? std::vector<int64_t>(trajectories.num_rows())
                                                 : sources_of_rows(options.mix, trajectories.num_rows());
  // Union-find: an earlier row of the same unit, or the row itself.
  std::vector<int64_t> joined(trajectories.num_rows());
  std::iota(joined.begin(), joined.end(), 0);
  const auto root_of = [&](int64_t row) {
    while (joined[row] != row) row = joined[row] = joined[joined[row]];
    return row;
  };
  // Names in different sources of a mix are distinct.
  const auto join = [&](const std::vector<std::string>& names, const auto& takes) {
    std::vector<std::unordered_map<std::string, int64_t>> known(std::max<size_t>(1, options.mix.size()));
    for (int64_t row = 0; row < trajectories.num_rows() && !names.empty(); ++row) {
      if (names[row].empty() || !takes(source_of_row[row])) continue;
      auto& known_rows = known[source_of_row[row]];
      const int64_t other = root_of(known_rows.try_emplace(names[row], row).first->second),
                    own = root_of(row);
      joined[std::max(own, other)] = std::min(own, other);
    }
  };
  if (keeps_groups) join(trajectories.group_id, [](int64_t) { return true; });
  join(trajectories.pair_id, [&](int64_t source) {
    return compares_pairs(options.mix.empty() ? options.objective : options.mix[source].objective);
  });
  std::vector<Rows> units;
  std::unordered_map<int64_t, size_t> unit_of_first;
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    const auto [entry, is_new] = unit_of_first.try_emplace(root_of(row), units.size());
    if (is_new) units.emplace_back();
    units[entry->second].push_back(row);
  }
  return units;
}

int64_t batch_size_of(const TrainOptions& options, int64_t num_rows) {
  return options.batch_size > 0 ? options.batch_size : num_rows;
}

int64_t num_steps_of(const TrainOptions& options, int64_t num_rows, int64_t num_units) {
  const int64_t batch_size = batch_size_of(options, num_rows);
  return std::min(num_rows / batch_size + (num_rows % batch_size > 0), num_units);
}

// Divides units in order into `num_steps` steps of at least one unit. Steps end where the cumulative number
// of rows is nearest to equal shares; if all units are single rows, steps have batch_size rows.
std::vector<Rows> cut_into_steps(const std::vector<Rows>& units, int64_t num_steps, int64_t batch_size) {
  std::vector<int64_t> rows_before{0};  // prefix sums of unit sizes
  for (const Rows& unit : units) rows_before.push_back(rows_before.back() + std::ssize(unit));
  const auto num_units = std::ssize(units);
  const int64_t num_rows = rows_before.back();
  std::vector<Rows> steps;
  int64_t unit = 0;
  for (int64_t step = 1; step <= num_steps; ++step) {
    const double share =
        static_cast<double>(num_rows) * static_cast<double>(step) / static_cast<double>(num_steps);
    const double wanted =
        num_rows == num_units ? static_cast<double>(std::min(step * batch_size, num_rows)) : share;
    const int64_t last = num_units - (num_steps - step);  // leave a unit for each later step
    int64_t end = unit + 1;
    const auto distance = [&](int64_t at) { return std::abs(static_cast<double>(rows_before[at]) - wanted); };
    while (end < last && distance(end + 1) <= distance(end)) ++end;
    if (step == num_steps) end = num_units;
    Rows& rows = steps.emplace_back();
    for (; unit < end; ++unit) rows.insert(rows.end(), units[unit].begin(), units[unit].end());
  }
  return steps;
}

}  // namespace

std::vector<std::vector<int64_t>> epoch_batches(const Trajectories& trajectories, const TrainOptions& options,
                                                int64_t epoch) {
  std::vector<Rows> units = whole_units(trajectories, options);
  if (options.shuffle != Shuffle::kNone) {
    Rng rng(options.seed, static_cast<uint64_t>(epoch));
    for (size_t i = units.size(); i > 1; --i)
      std::swap(units[i - 1], units[rng.below(static_cast<int64_t>(i))]);
  }
  const int64_t num_rows = trajectories.num_rows();
  return cut_into_steps(units, num_steps_of(options, num_rows, std::ssize(units)),
                        batch_size_of(options, num_rows));
}

int64_t steps_per_epoch(const Trajectories& trajectories, const TrainOptions& options) {
  return num_steps_of(options, trajectories.num_rows(), std::ssize(whole_units(trajectories, options)));
}

std::string uneven_steps_note(const Trajectories& trajectories, const TrainOptions& options) {
  if (options.batch_size == 0 || trajectories.num_rows() == 0) return "";
  int64_t least = trajectories.num_rows(), most = 0;
  const std::vector<Rows> batches = epoch_batches(trajectories, options, 0);
  for (size_t i = 0; i < batches.size(); ++i) {
    most = std::max(most, std::ssize(batches[i]));
    if (i + 1 < batches.size() || batches.size() == 1) least = std::min(least, std::ssize(batches[i]));
  }
  if (most <= options.batch_size && (least == most || batches.size() == 1)) return "";
  const bool keeps_pairs = compares_pairs(options);
  return fmt::format("{} stay whole, so steps have {} to {} trajectories where --batch-size is {}{}",
                     keeps_pairs ? "groups and pairs" : "groups", least, most, options.batch_size,
                     keeps_pairs ? "" : "; --shuffle rows takes trajectories singly");
}

int64_t total_steps(const Trajectories& trajectories, const TrainOptions& options) {
  if (options.steps > 0) return options.steps;
  const int64_t per_epoch = steps_per_epoch(trajectories, options);
  ESPALIER_CHECK(options.epochs <= kMostSteps / per_epoch,
                 "--epochs: {} epochs of {} steps are more than {} steps", options.epochs, per_epoch,
                 kMostSteps);
  return options.epochs * per_epoch;
}

namespace {

// By row: whether a token after the first carries loss.
std::vector<bool> rows_with_loss(const Trajectories& trajectories) {
  std::vector<bool> result(trajectories.num_rows());
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    for (int64_t i = trajectories.offsets[row] + 1; i < trajectories.offsets[row + 1] && !result[row]; ++i)
      result[row] = trajectories.loss_weights[i] > 0;
  }
  return result;
}

}  // namespace

void check_loss_of_steps(const Trajectories& trajectories, const TrainOptions& options, int64_t first,
                         int64_t last) {
  const std::vector<bool> with_loss = rows_with_loss(trajectories);
  if (std::find(with_loss.begin(), with_loss.end(), false) == with_loss.end()) return;
  constexpr int64_t kMostRows = 100'000'000;  // takes a few seconds
  const int64_t per_epoch = steps_per_epoch(trajectories, options);
  int64_t looked_at = 0;
  for (int64_t epoch = first / per_epoch; epoch * per_epoch < last && looked_at < kMostRows; ++epoch) {
    const std::vector<std::vector<int64_t>> batches = epoch_batches(trajectories, options, epoch);
    for (int64_t i = 0; i < per_epoch; ++i) {
      const int64_t step = epoch * per_epoch + i + 1;
      if (step <= first || step > last) continue;
      const std::vector<int64_t>& rows = batches[i];
      ESPALIER_CHECK(
          std::any_of(rows.begin(), rows.end(), [&](int64_t row) { return with_loss[row]; }),
          "step {}: no token carries loss in its {} trajectories, rows {}: expected a loss_mask or "
          "loss_weights above 0 somewhere after a first token (another batch-size or shuffle mixes "
          "such rows with others)",
          step, rows.size(), row_list(trajectories, rows));
    }
    if (options.shuffle == Shuffle::kNone) return;  // all epochs are equal
    looked_at += trajectories.num_rows();
  }
}

Step Steps::take(int64_t index) {
  RECORD_USER_SCOPE("plan");  // what the run waits for, not what the thread does
  if (!ahead_.valid()) return make(index);
  if (ahead_index_ == index) return ahead_.get();
  ahead_.wait();  // both would use the batches of the epoch
  return make(index);
}

void Steps::try_longest(int64_t first, int64_t last) {
  const std::vector<std::vector<int64_t>>& batches = batches_of(first);
  const auto per_epoch = static_cast<int64_t>(batches.size());
  const auto longest_in = [&](int64_t index) {
    int64_t size = 0;
    for (const int64_t row : batches[index % per_epoch])
      size = std::max(size, loss_.trajectories().row_size(row));
    return size;
  };
  int64_t index = first;
  for (int64_t other = first + 1; other < last && other % per_epoch != 0; ++other) {
    if (longest_in(other) > longest_in(index)) index = other;
  }
  make(index);
}

void Steps::make_ahead(int64_t index) {
  if (ahead_.valid()) ahead_.wait();
  ahead_index_ = index;
  ahead_ = std::async(std::launch::async, [this, index] { return make(index); });
}

const std::vector<std::vector<int64_t>>& Steps::batches_of(int64_t index) {
  if (batches_.empty()) batches_ = epoch_batches(loss_.trajectories(), options_, epoch_);
  const auto per_epoch = static_cast<int64_t>(batches_.size());
  if (index / per_epoch != epoch_) {
    epoch_ = index / per_epoch;
    batches_ = epoch_batches(loss_.trajectories(), options_, epoch_);
  }
  return batches_;
}

Step Steps::make(int64_t index) {
  const std::vector<std::vector<int64_t>>& batches = batches_of(index);
  return make_share(loss_, batches[index % static_cast<int64_t>(batches.size())],
                    {.plan = options_.plan,
                     .objective = options_.objective,
                     .costs = options_.costs ? &*options_.costs : nullptr,
                     .mix = options_.mix,
                     .context_group = options_.context_group},
                    *options_.group);
}

}  // namespace espalier
