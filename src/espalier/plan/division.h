// SPDX-License-Identifier: Apache-2.0
// The tokens of a micro-batch divided over ranks that compute it together (context parallelism).
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/plan/time_model.h"
#include "espalier/tree/layout.h"

namespace espalier {

/// A range of tokens of a micro-batch, and the rank that has it.
struct TokenPart {
  int64_t begin, end;
  int64_t rank;
  int64_t first;  // the number of its first token among those of the rank
};

/// What a visible pair costs, where a token costs 1.
double pair_cost(const TimeModel& model);

class TokenDivision {
 public:
  /// Cuts the tokens, in preorder, into four parts for each rank, equally many tokens each. A cut moves to
  /// where a branch begins if there is one close by. Each rank gets parts that see much and parts that see
  /// little. The same on all ranks. A rank may have no tokens.
  TokenDivision(const Layout& layout, int64_t ranks, double pair_cost);

  /// In the order of the tokens, which they cover.
  const std::vector<TokenPart>& parts() const { return parts_; }

  /// The tokens of a rank, ascending.
  std::vector<int64_t> tokens(int64_t rank) const;

  /// How many tokens of a rank come before `token`.
  int64_t before(int64_t rank, int64_t token) const;

  /// Calls visit(rank, begin, end) for the parts of a range of tokens, ascending.
  template <class Visit>
  void visit(int64_t begin, int64_t end, const Visit& visit) const {
    for (size_t k = part_of(begin); begin < end; begin = parts_[k++].end) {
      visit(parts_[k].rank, begin, std::min(end, parts_[k].end));
    }
  }

 private:
  size_t part_of(int64_t token) const;

  std::vector<TokenPart> parts_;
  std::vector<std::vector<TokenPart>> parts_by_rank_;
};

}  // namespace espalier
