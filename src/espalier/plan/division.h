// SPDX-License-Identifier: Apache-2.0
// The tokens of a micro-batch divided over ranks that compute it together (context parallelism).
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "espalier/plan/plan.h"
#include "espalier/plan/time_model.h"
#include "espalier/tree/layout.h"

namespace espalier {

/// A range of tokens of a micro-batch, and the rank that has it.
struct TokenRange {
  int64_t begin, end;
  int64_t rank;
  int64_t first;  // the number of its first token among those of the rank
};

/// How many ranges of tokens each rank gets, and which.
///
/// kBalanced    Four, equally many tokens each: some that see much and some that see little.
/// kContiguous  One, in the order of the ranks, all of about equal cost. For recurrences: their states pass
///              from rank to rank wherever a path goes on in another range.
enum class Sharding { kBalanced, kContiguous };

/// What a visible pair costs, where a token costs 1.
double pair_cost(const TimeModel& model);

class TokenDivision {
 public:
  /// Cuts the tokens, in preorder, into ranges. A cut moves to where a branch begins if there is one close
  /// by. A token costs 1 and `pair_cost` for each token that it sees, itself included. The same on all ranks.
  /// A rank may have no tokens.
  TokenDivision(const Layout& layout, int64_t ranks, double pair_cost,
                Sharding sharding = Sharding::kBalanced);

  /// In the order of the tokens, which they cover.
  const std::vector<TokenRange>& ranges() const { return ranges_; }

  /// [ranks] of the tokens of each.
  const std::vector<double>& costs() const { return costs_; }

  /// The tokens of a rank, ascending.
  std::vector<int64_t> tokens(int64_t rank) const;

  /// How many tokens of a rank come before `token`.
  int64_t before(int64_t rank, int64_t token) const;

  /// Calls visit(rank, begin, end) for what each rank has of a range of tokens, ascending.
  template <class Visit>
  void visit(int64_t begin, int64_t end, const Visit& visit) const {
    for (size_t k = range_of(begin); begin < end; begin = ranges_[k++].end) {
      visit(ranges_[k].rank, begin, std::min(end, ranges_[k].end));
    }
  }

 private:
  size_t range_of(int64_t token) const {
    return std::ranges::upper_bound(ranges_, token, {}, &TokenRange::begin) - ranges_.begin() - 1;
  }

  std::vector<TokenRange> ranges_;
  std::vector<double> costs_;
  std::vector<std::vector<TokenRange>> ranges_by_rank_;
};

/// The division of each micro-batch of a plan: what all trainers divide by.
std::vector<TokenDivision> token_divisions(const Forest& forest, std::span<const MicroBatch> micro_batches,
                                           int64_t ranks, double pair_cost,
                                           Sharding sharding = Sharding::kBalanced);

}  // namespace espalier
