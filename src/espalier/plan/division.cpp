// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/division.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <numeric>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/plan/ranks.h"

namespace espalier {
namespace {

constexpr int64_t kRangesOfRank = 4;  // with Sharding::kBalanced
constexpr double kSlack = 0.05;       // of a range, by which a cut may move

double token_cost(const Layout& layout, int64_t token, double pair_cost) {
  return 1 + pair_cost * (layout.position_ids[token] + 1);
}

/// The tokens where ranges begin. before: [T + 1] what comes before each token, of which each range is to
/// have equally much.
std::vector<int64_t> range_begins(const Layout& layout, const std::vector<double>& before, int64_t ranges) {
  std::vector<int64_t> branches;
  for (int64_t run = 0; run < layout.num_runs(); ++run) {
    const int64_t begin = layout.run_begin[run];
    if (layout.prev[begin] != begin - 1) branches.push_back(begin);
  }
  const auto nearest = [&](double amount) {  // the token that this much comes before
    const auto after = std::ranges::lower_bound(before, amount);
    if (after == before.begin()) return int64_t{0};
    const int64_t token = std::min<int64_t>(after - before.begin(), layout.num_tokens());
    return before[token] - amount <= amount - before[token - 1] ? token : token - 1;
  };
  const double size = before.back() / static_cast<double>(ranges);
  std::vector<int64_t> begins{0};
  for (int64_t k = 1; k < ranges; ++k) {
    const double amount = static_cast<double>(k) * size;
    const auto first = std::ranges::lower_bound(branches, nearest(amount - kSlack * size));
    const auto last = std::upper_bound(first, branches.end(), nearest(amount + kSlack * size));
    const auto position = [&](int64_t token) { return layout.position_ids[token]; };
    const int64_t begin =
        first == last ? nearest(amount) : *std::ranges::min_element(first, last, {}, position);
    if (begin > begins.back() && begin < layout.num_tokens()) begins.push_back(begin);
  }
  return begins;
}

/// What comes before each token, [T + 1]: tokens, or with Sharding::kContiguous their cost.
std::vector<double> amounts_before(const Layout& layout, double pair_cost, Sharding sharding) {
  std::vector<double> before{0};
  for (int64_t token = 0; token < layout.num_tokens(); ++token) {
    const double amount = sharding == Sharding::kContiguous ? token_cost(layout, token, pair_cost) : 1;
    before.push_back(before.back() + amount);
  }
  return before;
}

}  // namespace

double pair_cost(const TimeModel& model) {
  constexpr int64_t kShort = 256, kLong = 4096;
  const double few = path_seconds(model, kShort) / kShort, many = path_seconds(model, kLong) / kLong;
  const double pair = std::max(0.0, many - few) / ((kLong - kShort) / 2.0);
  return pair / (few - pair * (kShort + 1) / 2);
}

TokenDivision::TokenDivision(const Layout& layout, int64_t ranks, double pair_cost, Sharding sharding)
    : ranges_by_rank_(std::max<int64_t>(0, ranks)) {
  ESPALIER_ASSERT(ranks >= 1);
  const int64_t most = sharding == Sharding::kContiguous ? 1 : kRangesOfRank;  // ranges of a rank
  std::vector<int64_t> begins =
      range_begins(layout, amounts_before(layout, pair_cost, sharding), most * ranks);
  begins.push_back(layout.num_tokens());
  std::vector<double> cost;
  for (size_t k = 0; k + 1 < begins.size(); ++k) {
    ranges_.push_back({begins[k], begins[k + 1], 0, 0});
    cost.push_back(0);
    for (int64_t token = begins[k]; token < begins[k + 1]; ++token) {
      cost.back() += token_cost(layout, token, pair_cost);
    }
  }
  std::vector<size_t> order(ranges_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (sharding == Sharding::kBalanced) {
    std::ranges::stable_sort(order, std::greater(), [&](size_t k) { return cost[k]; });
  }
  std::vector<std::pair<double, int64_t>> load;  // by rank: of its ranges so far, and how many
  load.resize(ranks);
  for (const size_t k : order) {  // to the rank that has least, of those with room for another
    const auto rank = std::ranges::min_element(
        load, {}, [most](const auto& each) { return std::pair(each.second == most, each.first); });
    rank->first += cost[k];
    ++rank->second;
    ranges_[k].rank = rank - load.begin();
  }
  for (const auto& [sum, count] : load) costs_.push_back(sum);
  for (TokenRange& range : ranges_) {
    std::vector<TokenRange>& own = ranges_by_rank_[range.rank];
    range.first = own.empty() ? 0 : own.back().first + own.back().end - own.back().begin;
    own.push_back(range);
  }
}

std::vector<int64_t> TokenDivision::tokens(int64_t rank) const {
  std::vector<int64_t> tokens;
  for (const TokenRange& range : ranges_by_rank_.at(rank)) {
    tokens.resize(range.first + range.end - range.begin);
    std::iota(tokens.begin() + range.first, tokens.end(), range.begin);
  }
  return tokens;
}

int64_t TokenDivision::before(int64_t rank, int64_t token) const {
  const std::vector<TokenRange>& own = ranges_by_rank_[rank];
  const auto after = std::ranges::upper_bound(own, token, {}, &TokenRange::begin);
  if (after == own.begin()) return 0;
  const TokenRange& range = *std::prev(after);
  return range.first + std::min(token, range.end) - range.begin;
}

std::vector<TokenDivision> token_divisions(const Forest& forest, std::span<const MicroBatch> micro_batches,
                                           int64_t ranks, double pair_cost, Sharding sharding) {
  std::vector<TokenDivision> divisions;
  for (const MicroBatch& micro_batch : micro_batches) {
    divisions.emplace_back(make_micro_batch_layout(forest, micro_batch), ranks, pair_cost, sharding);
  }
  return divisions;
}

}  // namespace espalier
