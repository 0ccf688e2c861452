// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "espalier/plan/leaf_parts.h"
#include "espalier/plan/multi_path.h"
#include "tests/test_seed.h"
#include "tests/tree/naive.h"

namespace espalier {
namespace {

using testing::make_rows;
using testing::seeds;
using testing::test_seed;

int64_t encoded_tokens(const std::vector<MicroBatch>& batches) {
  int64_t tokens = 0;
  for (const MicroBatch& batch : batches) tokens += batch.num_tokens;
  return tokens;
}

TEST(TreePacking, TrajectoriesThatEndInsideAreFree) {
  // 1 2 and 1 end at inner nodes. Each goes with a leaf below it.
  const auto rows = make_rows({{1, 2}, {1, 2, 3, 3}, {1, 2, 4, 4}, {1}});
  const Forest forest = build_forest(rows.view());
  const std::vector<MicroBatch> batches = pack_trees(forest, 4);
  ASSERT_EQ(batches.size(), 2u);
  EXPECT_EQ(encoded_tokens(batches), 8);
  ASSERT_EQ(batches[0].trajectories.size(), 3u);
  EXPECT_EQ(batches[0].trajectories[0].trajectory, 0);
  EXPECT_EQ(batches[0].trajectories[1].trajectory, 1);
  EXPECT_EQ(batches[0].trajectories[2].trajectory, 3);
  EXPECT_EQ(batches[1].trajectories.size(), 1u);
}

TEST(TreePacking, PairsLeavesAcrossTheTree) {
  // Depth first, 1 3x8 closes the first part and 1 4 4 opens a third; the short ones share one part.
  const auto rows = make_rows({{1, 2, 2}, {1, 3, 3, 3, 3, 3, 3, 3, 3}, {1, 4, 4}});
  const Forest forest = build_forest(rows.view());
  const std::vector<MicroBatch> batches = pack_trees(forest, 9);
  ASSERT_EQ(batches.size(), 2u);
  EXPECT_EQ(encoded_tokens(batches), 14);
}

TEST(TreePacking, NeverBelowTheOptimumAndNear) {
  int64_t packed = 0, optimal = 0, too_generous = 0;
  for (uint64_t seed = 0; seed < seeds(1000); ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(test_seed(seed), 69);
    const testing::Rows rows = testing::random_rows(rng);
    const Forest forest = build_forest(rows.view());
    const int64_t budget = longest_trajectory(forest) + rng.below(5);
    int64_t optimum = 0, other = 0;
    for (int64_t root = 0; root < forest.num_nodes(); root = forest.subtree_last[root]) {
      TokenTree tree;
      for (int64_t n = root; n < forest.subtree_last[root]; ++n) {
        tree.parent.push_back(n == root ? -1 : forest.parent[n] - root);
        tree.size.push_back(forest.node_size(n));
      }
      optimum += pack_multi_path(tree, budget).total_tokens;
      other += pack_multi_path(tree, 2 * budget).total_tokens;
    }
    const int64_t tokens = encoded_tokens(pack_trees(forest, budget));
    ASSERT_GE(tokens, optimum);
    packed += tokens;
    optimal += optimum;
    too_generous += other;
  }
  EXPECT_LE(packed * 1000, optimal * 1005);
  EXPECT_LT(too_generous * 1005, packed * 1000);  // negative control: the optimum of another budget is far
}

/// What append-only merging promises: each trajectory once, at its end in a chain that is the root path of a
/// leaf; each leaf once.
bool has_leaf_paths(const Forest& forest, const std::vector<MicroBatch>& batches) {
  std::vector<int64_t> placed, leaves;
  for (const MicroBatch& batch : batches) {
    for (size_t k = 0; k < batch.runs.size(); ++k) {
      const Run& run = batch.runs[k];
      const bool is_last = k + 1 == batch.runs.size() || batch.runs[k + 1].parent < 0;
      if (run.parent >= 0 && run.parent != static_cast<int64_t>(k) - 1) return false;  // a branch
      if (is_last) leaves.push_back(run.end);
    }
    for (const auto& [trajectory, run] : batch.trajectories) {
      if (batch.runs[run].end != forest.node_begin[forest.end_node[trajectory] + 1]) return false;
      placed.push_back(trajectory);
    }
  }
  std::vector<int64_t> ends, all(forest.num_trajectories());
  for (int64_t n = 0; n < forest.num_nodes(); ++n) {
    if (forest.subtree_last[n] == n + 1) ends.push_back(forest.node_begin[n + 1]);
  }
  std::iota(all.begin(), all.end(), 0);
  std::sort(placed.begin(), placed.end());
  std::sort(leaves.begin(), leaves.end());
  return placed == all && leaves == ends;
}

TEST(AppendOnly, ChainsAreThePathsOfLeaves) {
  for (uint64_t seed = 0; seed < seeds(500); ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(test_seed(seed), 70);
    const testing::Rows rows = testing::random_rows(rng);
    const Forest forest = build_forest(rows.view());
    const int64_t budget = longest_trajectory(forest) + rng.below(5);
    const std::vector<MicroBatch> batches = pack_leaf_paths(forest, budget);
    ASSERT_TRUE(has_leaf_paths(forest, batches));
    for (const MicroBatch& batch : batches) ASSERT_LE(batch.num_tokens, budget);
    ASSERT_GE(encoded_tokens(batches), forest.tree_tokens());
    ASSERT_LE(encoded_tokens(batches), forest.flat_tokens());
    if (forest.tree_tokens() < forest.flat_tokens()) {  // negative control: what it is not
      const auto flat = pack_sequences(forest, forest.flat_tokens());
      const auto tree = pack_trees(forest, forest.flat_tokens());
      ASSERT_FALSE(has_leaf_paths(forest, flat) && has_leaf_paths(forest, tree));
    }
  }
}

TEST(AppendOnly, EncodesWhatNoOtherTrajectoryExtends) {
  const auto rows = make_rows({{1, 2}, {1, 2, 3, 3}, {1, 2, 4, 4}, {1}, {1, 2, 3, 3}});
  const Forest forest = build_forest(rows.view());
  EXPECT_EQ(encoded_tokens(pack_leaf_paths(forest, 4)), 8);
  EXPECT_EQ(pack_leaf_paths(forest, 8).size(), 1u);
  EXPECT_EQ(encoded_tokens(pack_sequences(forest, 4)), 15);
}

}  // namespace
}  // namespace espalier
