// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/share.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "espalier/base/hash.h"
#include "espalier/plan/packing.h"
#include "espalier/plan/ranks.h"

namespace espalier {
namespace {

/// Sets of trajectories that stay on one rank, in the order of their first members.
std::vector<std::vector<int64_t>> units_of(const Step& step, const Loss& loss) {
  std::vector<int64_t> joined(step.rows.size());  // by trajectory: an earlier one of its set, or itself
  std::iota(joined.begin(), joined.end(), 0);
  const auto root_of = [&](int64_t k) {
    while (joined[k] != k) k = joined[k] = joined[joined[k]];
    return k;
  };
  const auto join = [&](int64_t a, int64_t b) {
    const auto [first, second] = std::minmax({root_of(a), root_of(b)});
    joined[second] = first;
  };
  std::unordered_map<int64_t, int64_t> first_of;  // by unit of the loss
  const std::vector<int64_t> unit_of = loss.units_of(step.rows);
  for (int64_t k = 0; k < std::ssize(unit_of); ++k)
    join(first_of.try_emplace(unit_of[k], k).first->second, k);
  for (int64_t term = 0; term < step.sharers.num_rows(); ++term) {
    for (const int64_t k : step.sharers.row(term)) join(step.sharers.row(term).front(), k);
  }
  std::map<int64_t, std::vector<int64_t>> sets;  // by their first members
  for (int64_t k = 0; k < std::ssize(joined); ++k) sets[root_of(k)].push_back(k);
  std::vector<std::vector<int64_t>> units;
  for (auto& [first, members] : sets) units.push_back(std::move(members));
  return units;
}

Forest forest_of_some(const Step& whole, const std::vector<int64_t>& trajectories, const Loss& loss,
                      const StepOptions& options) {
  std::vector<int64_t> rows;
  for (const int64_t k : trajectories) rows.push_back(whole.rows[k]);
  if (rows.empty()) return {};  // without rows, forest_of takes all
  return forest_of(loss.trajectories(), rows, options.child_order);
}

std::string digest_of(const Step& whole, const std::vector<std::vector<int64_t>>& shares) {
  Hasher hasher;
  hasher.add_values(std::span<const int64_t>(whole.rows));
  std::vector<double> coefficients;
  for (const Term& term : whole.terms.values) coefficients.push_back(term.coefficient);
  hasher.add_values(std::span<const double>(coefficients));
  for (const std::vector<int64_t>& share : shares) {
    hasher.add_values(std::span<const int64_t>(share));
    hasher.add_values(std::span<const int64_t>({std::ssize(share)}));
  }
  return hasher.digits();
}

/// Divides the micro-batches of the step over the ranks of options.context_group.
void divide_micro_batches(const StepOptions& options, Step* step) {
  step->context_group = options.context_group;
  const TimeModel time = options.costs == nullptr ? common_costs().time : options.costs->time;
  step->divisions =
      token_divisions(step->forest, step->plan.micro_batches, options.context_group->size(), pair_cost(time));
  Hasher hasher;
  hasher.add_values(std::span<const int32_t>(step->forest.tokens));
  for (size_t m = 0; m < step->divisions.size(); ++m) {
    const MicroBatch& micro_batch = step->plan.micro_batches[m];
    for (const Run& run : micro_batch.runs) {
      hasher.add_values(std::span<const int64_t>({micro_batch.parent, run.begin, run.end, run.parent}));
    }
    for (const TokenRange& range : step->divisions[m].ranges()) {
      hasher.add_values(std::span<const int64_t>({range.begin, range.rank}));
    }
  }
  step->divisions_digest = hasher.digits();
}

}  // namespace

std::vector<std::vector<int64_t>> divide_step(const Step& step, const Loss& loss, const StepOptions& options,
                                              int64_t ranks) {
  if (ranks == 1) {
    std::vector<int64_t> all(step.rows.size());
    std::iota(all.begin(), all.end(), 0);
    return {all};
  }
  const TimeModel time = options.costs == nullptr ? common_costs().time : options.costs->time;
  const std::vector<std::vector<int64_t>> units = units_of(step, loss);
  std::vector<std::vector<int64_t>> shares;
  if (units.size() == step.rows.size()) {
    for (RankShare& share : distribute(step.forest, ranks, time).ranks) {
      shares.push_back(std::move(share.trajectories));
    }
    return shares;
  }
  std::vector<double> seconds;
  for (const std::vector<int64_t>& unit : units) {
    seconds.push_back(distribute(forest_of_some(step, unit, loss, options), 1, time).seconds());
  }
  for (const std::vector<int64_t>& chosen : largest_differencing(seconds, ranks)) {
    std::vector<int64_t>& share = shares.emplace_back();
    for (const int64_t unit : chosen) share.insert(share.end(), units[unit].begin(), units[unit].end());
    std::ranges::sort(share);
  }
  return shares;
}

Step share_of(Step whole, const std::vector<int64_t>& trajectories, const Loss& loss,
              const StepOptions& options) {
  if (trajectories.size() == whole.rows.size()) return whole;
  Step own;
  own.whole = whole.whole;
  own.forest = forest_of_some(whole, trajectories, loss, options);
  std::vector<int64_t> number(whole.rows.size(), -1);  // by trajectory of the whole step: here
  for (const int64_t k : trajectories) {
    number[k] = std::ssize(own.rows);
    own.rows.push_back(whole.rows[k]);
    own.terms.push_row(whole.terms.row(k));
  }
  for (const int64_t k : trajectories) {
    if (whole.sharers.num_rows() == 0) break;
    for (int64_t term = whole.terms.offsets[k]; term < whole.terms.offsets[k + 1]; ++term) {
      for (const int64_t sharer : whole.sharers.row(term)) own.sharers.values.push_back(number[sharer]);
      own.sharers.end_row();
    }
  }
  return own;
}

Step make_share(const Loss& loss, std::vector<int64_t> rows, const StepOptions& options, const Group& group) {
  Step step = unplanned_step(loss.trajectories(), std::move(rows), options);
  const int64_t together = options.context_group == nullptr ? 1 : options.context_group->size();
  const std::vector<std::vector<int64_t>> shares = divide_step(step, loss, options, group.size() / together);
  step.whole.is_divided = group.size() > 1;
  step.whole.digest = digest_of(step, shares);
  step = share_of(std::move(step), shares[group.rank() / together], loss, options);
  plan_step(options, &step);
  if (together > 1) divide_micro_batches(options, &step);
  return step;
}

}  // namespace espalier
