// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/division.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "espalier/plan/ranks.h"

namespace espalier {
namespace {

constexpr int64_t kPartsOfRank = 4;
constexpr double kSlack = 0.05;  // of a part, by which a cut may move

/// The tokens where parts begin.
std::vector<int64_t> part_begins(const Layout& layout, int64_t parts) {
  std::vector<int64_t> branches;
  for (int64_t run = 0; run < layout.num_runs(); ++run) {
    const int64_t begin = layout.run_begin[run];
    if (layout.prev[begin] != begin - 1) branches.push_back(begin);
  }
  const double size = static_cast<double>(layout.num_tokens()) / static_cast<double>(parts);
  std::vector<int64_t> begins{0};
  for (int64_t k = 1; k < parts; ++k) {
    const double place = static_cast<double>(k) * size;
    const auto first = std::ranges::lower_bound(branches, std::llround(place - kSlack * size));
    const auto last = std::upper_bound(first, branches.end(), std::llround(place + kSlack * size));
    const auto position = [&](int64_t token) { return layout.position_ids[token]; };
    const int64_t begin =
        first == last ? std::llround(place) : *std::ranges::min_element(first, last, {}, position);
    if (begin > begins.back() && begin < layout.num_tokens()) begins.push_back(begin);
  }
  return begins;
}

}  // namespace

double pair_cost(const TimeModel& model) {
  constexpr int64_t kShort = 256, kLong = 4096;
  const double few = path_seconds(model, kShort) / kShort, many = path_seconds(model, kLong) / kLong;
  const double pair = std::max(0.0, many - few) / ((kLong - kShort) / 2.0);
  return pair / (few - pair * (kShort + 1) / 2);
}

TokenDivision::TokenDivision(const Layout& layout, int64_t ranks, double pair_cost) : parts_by_rank_(ranks) {
  std::vector<int64_t> begins = part_begins(layout, kPartsOfRank * ranks);
  begins.push_back(layout.num_tokens());
  std::vector<double> cost;
  for (size_t k = 0; k + 1 < begins.size(); ++k) {
    parts_.push_back({begins[k], begins[k + 1], 0, 0});
    cost.push_back(0);
    for (int64_t token = begins[k]; token < begins[k + 1]; ++token) {
      cost.back() += 1 + pair_cost * (layout.position_ids[token] + 1);
    }
  }
  std::vector<size_t> order(parts_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, std::greater(), [&](size_t k) { return cost[k]; });
  std::vector<std::pair<double, int64_t>> load;  // by rank: of its parts so far, and how many
  load.resize(ranks);
  for (const size_t k : order) {  // to the rank that has least, of those with room for another
    const auto rank = std::ranges::min_element(
        load, {}, [](const auto& each) { return std::pair(each.second == kPartsOfRank, each.first); });
    rank->first += cost[k];
    ++rank->second;
    parts_[k].rank = rank - load.begin();
  }
  for (TokenPart& part : parts_) {
    std::vector<TokenPart>& own = parts_by_rank_[part.rank];
    part.first = own.empty() ? 0 : own.back().first + own.back().end - own.back().begin;
    own.push_back(part);
  }
}

std::vector<int64_t> TokenDivision::tokens(int64_t rank) const {
  std::vector<int64_t> tokens;
  for (const TokenPart& part : parts_by_rank_[rank]) {
    tokens.resize(part.first + part.end - part.begin);
    std::iota(tokens.begin() + part.first, tokens.end(), part.begin);
  }
  return tokens;
}

int64_t TokenDivision::before(int64_t rank, int64_t token) const {
  const std::vector<TokenPart>& own = parts_by_rank_[rank];
  const auto after = std::ranges::upper_bound(own, token, {}, &TokenPart::begin);
  if (after == own.begin()) return 0;
  const TokenPart& part = *std::prev(after);
  return part.first + std::min(token, part.end) - part.begin;
}

size_t TokenDivision::part_of(int64_t token) const {
  return std::ranges::upper_bound(parts_, token, {}, &TokenPart::begin) - parts_.begin() - 1;
}

}  // namespace espalier
