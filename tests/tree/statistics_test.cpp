// SPDX-License-Identifier: Apache-2.0
#include "espalier/tree/forest.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/test_seed.h"
#include "tests/tree/naive.h"

namespace espalier {
namespace {

using testing::make_rows;
using testing::Rows;
using testing::seeds;
using testing::test_seed;
using Counts = std::map<int64_t, int64_t>;

int64_t triangle(int64_t n) {
  return n * (n + 1) / 2;
}

TEST(Statistics, HandMadeExample) {
  const Rows rows = make_rows({{1, 2, 3, 4}, {1, 2, 5}, {9}, {1, 2}, {1, 2, 5}, {1, 2, 3, 4, 6}});
  const ForestStatistics statistics = forest_statistics(build_forest(rows.view()));
  EXPECT_EQ(statistics.num_trajectories, 6);
  EXPECT_EQ(statistics.num_trees, 2);
  EXPECT_EQ(statistics.num_nodes, 5);
  EXPECT_EQ(statistics.num_leaves, 3);
  EXPECT_EQ(statistics.flat_tokens, 18);
  EXPECT_EQ(statistics.tree_tokens, 7);
  EXPECT_EQ(statistics.append_only_tokens, 5 + 3 + 1);
  EXPECT_EQ(statistics.append_only_pairs, triangle(5) + triangle(3) + triangle(1));
  EXPECT_EQ(statistics.flat_pairs, triangle(4) + 2 * triangle(3) + triangle(1) + triangle(2) + triangle(5));
  EXPECT_EQ(statistics.tree_pairs, triangle(5) + 3 + 1);
  EXPECT_DOUBLE_EQ(statistics.cached_token_ratio, 18.0 / 7);
  EXPECT_DOUBLE_EQ(statistics.por, 1 - 7.0 / 18);
  EXPECT_EQ(statistics.max_depth_nodes, 3);
  EXPECT_EQ(statistics.max_depth_tokens, 5);
  EXPECT_DOUBLE_EQ(statistics.mean_branching, 1.5);
  EXPECT_EQ(statistics.max_branching, 2);
  EXPECT_EQ(statistics.tokens_by_multiplicity, (Counts{{1, 2}, {2, 3}, {5, 2}}));
  EXPECT_EQ(statistics.nodes_by_branching, (Counts{{0, 3}, {1, 1}, {2, 1}}));
}

TEST(Statistics, NothingSharedAndNothingAtAll) {
  const ForestStatistics apart = forest_statistics(build_forest(make_rows({{1, 2}, {3}}).view()));
  EXPECT_EQ(apart.cached_token_ratio, 1);
  EXPECT_EQ(apart.por, 0);
  EXPECT_EQ(apart.mean_branching, 0);
  EXPECT_EQ(apart.append_only_tokens, 3);
  const ForestStatistics empty = forest_statistics(build_forest(make_rows({}).view()));
  EXPECT_EQ(empty.cached_token_ratio, 1);
  EXPECT_EQ(empty.tree_tokens, 0);
}

/// Whether the first row's keys and tokens begin the second one's.
bool begins(const Rows& rows, int64_t a, int64_t b) {
  if (!rows.tree_keys.empty() && rows.tree_keys[a] != rows.tree_keys[b]) return false;
  if (rows.tokens.row_size(a) > rows.tokens.row_size(b)) return false;
  for (int64_t t = 0; t < rows.tokens.row_size(a); ++t) {
    const int64_t at_a = rows.tokens.offsets[a] + t, at_b = rows.tokens.offsets[b] + t;
    if (rows.tokens.values[at_a] != rows.tokens.values[at_b]) return false;
    if (!rows.merge_keys.empty() && rows.merge_keys[at_a] != rows.merge_keys[at_b]) return false;
  }
  return true;
}

TEST(Statistics, RandomForestsMatchRowByRowCounts) {
  for (uint64_t seed = 0; seed < seeds(2000); ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(test_seed(seed), 2);
    const Rows rows = testing::random_rows(rng);
    const Forest forest = build_forest(rows.view());
    const ForestStatistics statistics = forest_statistics(forest);
    int64_t flat = 0, flat_pairs = 0, kept = 0, kept_pairs = 0;
    for (int64_t r = 0; r < rows.tokens.num_rows(); ++r) {
      const int64_t size = rows.tokens.row_size(r);
      flat += size;
      flat_pairs += triangle(size);
      bool dropped = false;
      for (int64_t s = 0; s < rows.tokens.num_rows(); ++s) {
        const bool equal = rows.tokens.row_size(s) == size;
        dropped = dropped || (s != r && begins(rows, r, s) && (!equal || s < r));
      }
      kept += dropped ? 0 : size;
      kept_pairs += dropped ? 0 : triangle(size);
    }
    ASSERT_EQ(statistics.flat_tokens, flat);
    ASSERT_EQ(statistics.flat_pairs, flat_pairs);
    ASSERT_EQ(statistics.append_only_tokens, kept);
    ASSERT_EQ(statistics.append_only_pairs, kept_pairs);
    ASSERT_EQ(statistics.tree_pairs, visible_pairs(make_layout(forest, whole_forest(forest))));
    int64_t tokens = 0, weighted = 0, nodes = 0;
    for (const auto& [multiplicity, count] : statistics.tokens_by_multiplicity) {
      tokens += count;
      weighted += multiplicity * count;
    }
    for (const auto& [children, count] : statistics.nodes_by_branching) nodes += count;
    ASSERT_EQ(tokens, statistics.tree_tokens);
    ASSERT_EQ(weighted, flat);
    ASSERT_EQ(nodes, statistics.num_nodes);
  }
}

}  // namespace
}  // namespace espalier
