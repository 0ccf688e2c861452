// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/division.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "espalier/plan/partition.h"
#include "espalier/plan/planner.h"
#include "espalier/tree/synth.h"
#include "tests/test_seed.h"
#include "tests/tree/naive.h"

namespace espalier {
namespace {

using testing::seeds;
using testing::test_seed;

constexpr double kPair = 0.01;
constexpr int64_t kLong = 20'000;

Layout chain(int64_t tokens) {
  std::vector<int32_t> row(tokens);
  std::iota(row.begin(), row.end(), 0);
  Csr<int32_t> rows;
  rows.push_row(row);
  const Forest forest = testing::forest_of(rows);
  return make_layout(forest, whole_forest(forest));
}

/// Rows of the first tokens of one path, `depths` of them, and then so many tokens that no other row has.
Layout branches(const std::vector<int64_t>& depths, int64_t length) {
  Csr<int32_t> rows;
  auto next = static_cast<int32_t>(*std::ranges::max_element(depths));
  for (const int64_t depth : depths) {
    std::vector<int32_t> row(depth + length);
    std::iota(row.begin(), row.begin() + depth, 0);
    std::iota(row.begin() + depth, row.end(), next);
    next += static_cast<int32_t>(length);
    rows.push_row(row);
  }
  const Forest forest = testing::forest_of(rows);
  return make_layout(forest, whole_forest(forest));
}

Layout random_branches(uint64_t seed) {
  Rng rng(test_seed(seed), 0xD171);
  std::vector<int64_t> depths;
  for (int64_t k = 0; k < 50; ++k) depths.push_back(rng.between(1, 3000));
  return branches(depths, 400);
}

std::vector<int64_t> begins(const TokenDivision& division) {
  std::vector<int64_t> begins;
  for (const TokenRange& range : division.ranges()) begins.push_back(range.begin);
  return begins;
}

/// The largest of them over the mean.
template <class T>
double imbalance(const std::vector<T>& values) {
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
  return static_cast<double>(*std::ranges::max_element(values)) / mean;
}

std::vector<int64_t> tokens_of_ranks(const TokenDivision& division, int64_t ranks) {
  std::vector<int64_t> counts;
  for (int64_t rank = 0; rank < ranks; ++rank) counts.push_back(std::ssize(division.tokens(rank)));
  return counts;
}

// Up to where a cut moves to the beginning of a branch.
TEST(TokenDivision, RanksHaveEqualShares) {
  for (uint64_t seed = 0; seed < seeds(50); ++seed) {
    SCOPED_TRACE(seed);
    const int64_t ranks = 2 + static_cast<int64_t>(seed % 5);
    const Forest forest = testing::forest_of(
        synthesize({.depth = 3, .branching = 3, .node_length = 60, .seed = test_seed(seed)}));
    const Layout layout = make_layout(forest, whole_forest(forest));
    const TokenDivision division(layout, ranks, kPair);
    int64_t tokens = 0;
    for (const int64_t own : tokens_of_ranks(division, ranks)) {
      tokens += own;
      EXPECT_NEAR(static_cast<double>(own * ranks) / static_cast<double>(layout.num_tokens()), 1, 0.15);
    }
    EXPECT_EQ(tokens, layout.num_tokens());
  }
}

// Costs of ranks are about equal, also where pairs cost more than tokens; balanced ranges have equally many
// tokens, too.
TEST(TokenDivision, CostsAreEqual) {
  for (const Layout& layout : {chain(kLong), random_branches(5)}) {
    for (const double pair : {0.0, pair_cost(common_costs().time), kPair}) {
      for (const int64_t ranks : {2, 8, 64}) {
        SCOPED_TRACE(::testing::Message()
                     << layout.num_tokens() << " tokens, " << ranks << " ranks, " << pair);
        const TokenDivision balanced(layout, ranks, pair);
        EXPECT_LE(imbalance(balanced.costs()), 1.1);
        EXPECT_LE(imbalance(tokens_of_ranks(balanced, ranks)), 1.05);
        const TokenDivision contiguous(layout, ranks, pair, Sharding::kContiguous);
        EXPECT_LE(imbalance(contiguous.costs()), 1.1);
        ASSERT_EQ(std::ssize(contiguous.ranges()), ranks);
        for (int64_t k = 0; k < ranks; ++k) EXPECT_EQ(contiguous.ranges()[k].rank, k);
      }
    }
  }
}

// What the bounds notice: contiguous ranges of equally many tokens cost more towards the end of a path.
TEST(TokenDivision, EqualTokensAreNotEqualCosts) {
  const Layout layout = chain(kLong);
  const TokenDivision by_tokens(layout, 8, 0, Sharding::kContiguous);
  std::vector<double> costs(8);
  for (const TokenRange& range : by_tokens.ranges()) {
    for (int64_t token = range.begin; token < range.end; ++token) {
      costs[range.rank] += 1 + kPair * (layout.position_ids[token] + 1);
    }
  }
  EXPECT_GT(imbalance(costs), 1.5);
  EXPECT_GT(imbalance(tokens_of_ranks(TokenDivision(layout, 8, kPair, Sharding::kContiguous), 8)), 1.5);
}

TEST(TokenDivision, CostsAreThoseOfTheTokens) {
  const Layout layout = random_branches(7);
  for (const Sharding sharding : {Sharding::kBalanced, Sharding::kContiguous}) {
    const TokenDivision division(layout, 5, kPair, sharding);
    for (int64_t rank = 0; rank < 5; ++rank) {
      double cost = 0;
      for (const int64_t token : division.tokens(rank)) cost += 1 + kPair * (layout.position_ids[token] + 1);
      EXPECT_NEAR(division.costs()[rank], cost, 1e-9 * cost);
    }
  }
}

TEST(TokenDivision, CutsAreWhereBranchesBegin) {
  const Layout star = branches(std::vector<int64_t>(9, 100), 100);
  ASSERT_EQ(star.num_tokens(), 1000);
  const std::vector<int64_t> hundreds = {0, 100, 200, 300, 400, 500, 600, 700, 800, 900};
  EXPECT_EQ(begins(TokenDivision(star, 10, 0, Sharding::kContiguous)), hundreds);
  // A twentieth of a range away at most: 204, 304 and 320 of these, but not 220. First children go on from
  // the token before, and begin nothing.
  const Layout near = branches({104, 104, 104}, 100), far = branches({120, 120, 120}, 100);
  EXPECT_EQ(begins(TokenDivision(near, 4, 0, Sharding::kContiguous)),
            (std::vector<int64_t>{0, 101, 204, 304}));
  EXPECT_EQ(begins(TokenDivision(far, 4, 0, Sharding::kContiguous)),
            (std::vector<int64_t>{0, 105, 210, 320}));
}

TEST(TokenDivision, FewerTokensThanRanks) {
  for (const Sharding sharding : {Sharding::kBalanced, Sharding::kContiguous}) {
    const TokenDivision division(chain(3), 8, 0, sharding);
    EXPECT_EQ(begins(division), (std::vector<int64_t>{0, 1, 2}));
    EXPECT_EQ(imbalance(tokens_of_ranks(division, 8)), 8.0 / 3);  // one token at most
    EXPECT_EQ(division.costs().size(), 8);
  }
}

TEST(TokenDivision, DivisionsOfAPlanAreThoseOfItsMicroBatches) {
  const Forest forest = testing::forest_of(
      synthesize({.num_trees = 2, .depth = 3, .branching = 3, .node_length = 20, .seed = test_seed(3)}));
  const std::vector<MicroBatch> batches = partition(forest, 200, Merge::kAll);
  ASSERT_GT(batches.size(), 2);
  const std::vector<TokenDivision> divisions = token_divisions(forest, batches, 3, kPair);
  ASSERT_EQ(divisions.size(), batches.size());
  for (size_t m = 0; m < batches.size(); ++m) {
    const TokenDivision alone(make_micro_batch_layout(forest, batches[m]), 3, kPair);
    for (int64_t rank = 0; rank < 3; ++rank) EXPECT_EQ(divisions[m].tokens(rank), alone.tokens(rank));
  }
}

}  // namespace
}  // namespace espalier
