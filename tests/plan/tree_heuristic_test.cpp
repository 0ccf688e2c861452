// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/tree_heuristic.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "espalier/base/check.h"
#include "espalier/plan/local_search.h"
#include "espalier/plan/multi_path.h"
#include "tests/plan/tree_shapes.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::kIsSanitized;
using testing::kTreeShapes;
using testing::parts_fault;
using testing::random_budget;
using testing::random_tree;
using testing::seeds;
using testing::test_seed;
using testing::TreeShape;

/// A spine of `depth` nodes with a leaf at each: the deepest tree with that many leaves.
TokenTree comb(int64_t depth) {
  TokenTree tree;
  for (int64_t n = 0; n < depth; ++n) {
    const int64_t spine = n == 0 ? -1 : tree.num_nodes() - 2;
    tree.parent.push_back(spine);
    tree.size.push_back(1);
    if (n + 1 < depth) {
      tree.parent.push_back(tree.num_nodes() - 1);
      tree.size.push_back(2);
    }
  }
  return tree;
}

TEST(TreeHeuristic, NearTheOptimumOfSmallTrees) {
  double ratios = 0, worst = 1, unsearched_ratios = 0, single_ratios = 0, depth_first_ratios = 0;
  int64_t split = 0, solved = 0;
  for (uint64_t seed = 0; seed < seeds(1000); ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(test_seed(seed), 66);
    const TokenTree tree = random_tree(kTreeShapes[seed % 6], rng.between(2, 12), rng);
    const LeafPaths leaves = leaf_paths(tree);
    const int64_t budget = random_budget(tree, rng);
    const LeafParts parts = split_tree(tree, budget, search_work(leaves.num_leaves()));
    ASSERT_EQ(parts_fault(tree, budget, parts), "");
    const int64_t found = total_tokens(leaves, parts);
    // kNothingWithinBound would mean that the heuristic is below the optimum.
    const MultiPathPacking exact = pack_multi_path(tree, budget, {.upper_bound = found});
    ASSERT_NE(exact.outcome, MultiPathOutcome::kNothingWithinBound);
    if (exact.outcome == MultiPathOutcome::kGaveUp) continue;  // one tree in thousands is too hard for it
    ++solved;
    const int64_t optimum = exact.total_tokens;
    if (leaves.num_leaves() <= 8) {
      ASSERT_EQ(pack_multi_path(tree, budget).total_tokens, optimum);
    }
    ASSERT_GE(pack_single_path(tree, budget).total_tokens, optimum);
    const double ratio = static_cast<double>(found) / static_cast<double>(optimum);
    ratios += ratio;
    worst = std::max(worst, ratio);
    single_ratios +=
        static_cast<double>(pack_single_path(tree, budget).total_tokens) / static_cast<double>(optimum);
    depth_first_ratios += static_cast<double>(total_tokens(leaves, fill_depth_first(tree, budget))) /
                          static_cast<double>(optimum);
    unsearched_ratios +=
        static_cast<double>(total_tokens(leaves, split_tree(tree, budget, 0))) / static_cast<double>(optimum);
    split += exact.parts.num_rows() > 1;
  }
  if (kIsSanitized) return;
  ASSERT_GE(solved, 990);
  const auto count = static_cast<double>(solved);
  fmt::print(
      "mean over the optimum {:.5f}, worst {:.3f}; without search {:.5f}, depth-first fill {:.4f}, single "
      "path {:.4f}\n",
      ratios / count, worst, unsearched_ratios / count, depth_first_ratios / count, single_ratios / count);
  EXPECT_LE(ratios / count, 1.0005);
  EXPECT_LE(worst, 1.15);
  EXPECT_GT(split, 900);
  // Negative controls: the simpler packings exceed the bound.
  EXPECT_GT(unsearched_ratios / count, 1.0005);
  EXPECT_GT(depth_first_ratios / count, 1.01);
  EXPECT_GT(single_ratios / count, 1.01);
}

TEST(TreeHeuristic, EveryStageIsAPacking) {
  for (uint64_t seed = 0; seed < seeds(200); ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(test_seed(seed), 67);
    const TokenTree tree = random_tree(kTreeShapes[seed % 6], rng.between(1, 60), rng);
    const LeafPaths leaves = leaf_paths(tree);
    const int64_t budget = random_budget(tree, rng);
    const LeafParts filled = fill_depth_first(tree, budget), merged = merge_bottom_up(tree, budget);
    ASSERT_EQ(parts_fault(tree, budget, filled), "");
    ASSERT_EQ(parts_fault(tree, budget, merged), "");
    ASSERT_GE(total_tokens(leaves, merged), tree.num_tokens());
    for (const LeafParts& parts : {filled, merged, pack_single_path(tree, budget).parts}) {
      const LeafParts better = improve_parts(leaves, budget, parts, 100'000);
      ASSERT_EQ(parts_fault(tree, budget, better), "");
      ASSERT_LE(total_tokens(leaves, better), total_tokens(leaves, parts));
    }
    const LeafParts split = split_tree(tree, budget, 0), searched = split_tree(tree, budget, 100'000);
    ASSERT_EQ(parts_fault(tree, budget, searched), "");
    ASSERT_LE(total_tokens(leaves, split),
              std::min(total_tokens(leaves, filled), total_tokens(leaves, merged)));
    ASSERT_LE(total_tokens(leaves, searched), total_tokens(leaves, split));
    ASSERT_EQ(searched.values, split_tree(tree, budget, 100'000).values);
  }
}

TEST(TreeHeuristic, MergesAsBestFitDecreasingWouldBelowOneRoot) {
  // A root of 10 and leaves of 6, 5, 5, 4: two parts of 20 need the pairs 6 + 4 and 5 + 5.
  const TokenTree tree{.parent = {-1, 0, 0, 0, 0}, .size = {10, 6, 5, 5, 4}};
  const LeafPaths leaves = leaf_paths(tree);
  EXPECT_EQ(total_tokens(leaves, merge_bottom_up(tree, 20)), 40);
  EXPECT_EQ(total_tokens(leaves, fill_depth_first(tree, 20)), 16 + 20 + 14);
}

TEST(TreeHeuristic, SearchLeavesAGreedyTrap) {
  // Below the root (1): a node of 10 with leaves 4 and 4, another with leaves 3 and 5. Any fit at 19 or more.
  const TokenTree tree{.parent = {-1, 0, 1, 1, 0, 4, 4}, .size = {1, 10, 4, 4, 10, 3, 5}};
  const LeafPaths leaves = leaf_paths(tree);
  const LeafParts bad = parts_from_labels({0, 1, 2, 2});
  EXPECT_EQ(total_tokens(leaves, bad), 15 + 15 + 19);
  EXPECT_EQ(total_tokens(leaves, improve_parts(leaves, 19, bad, 10'000)), 38);
  EXPECT_EQ(total_tokens(leaves, improve_parts(leaves, 19, bad, 0)), 49);  // negative control
}

TEST(TreeHeuristic, ATreeThatFitsIsOnePart) {
  Rng rng(test_seed(3), 68);
  const TokenTree tree = random_tree(TreeShape::kUnbalanced, 50, rng);
  EXPECT_EQ(split_tree(tree, tree.num_tokens(), 1000).num_rows(), 1);
  EXPECT_GT(split_tree(tree, tree.num_tokens() - 1, 1000).num_rows(), 1);
  EXPECT_EQ(split_tree({}, 1, 1000).num_rows(), 0);
}

TEST(TreeHeuristic, RefusesALeafOverTheBudget) {
  const TokenTree tree{.parent = {-1, 0, 0}, .size = {10, 6, 5}};
  EXPECT_THROW(split_tree(tree, 15, 0), InternalError);
  EXPECT_NO_THROW(split_tree(tree, 16, 0));
}

TEST(TreeHeuristic, CombOfAHundredThousandNodes) {
  const TokenTree tree = comb(50'001);
  const LeafPaths leaves = leaf_paths(tree);
  for (const int64_t budget : {50'002, 80'000, 140'000}) {
    const LeafParts parts = split_tree(tree, budget, 200'000);
    int64_t placed = 0;
    for (const int64_t tokens : part_tokens(leaves, parts)) ASSERT_LE(tokens, budget);
    for (int64_t p = 0; p < parts.num_rows(); ++p) placed += parts.row_size(p);
    EXPECT_EQ(placed, leaves.num_leaves());
    EXPECT_LT(total_tokens(leaves, parts), leaves.num_leaves() * budget);
  }
}

}  // namespace
}  // namespace espalier
