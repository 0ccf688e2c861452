// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/multi_path.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "espalier/plan/tree_heuristic.h"
#include "tests/plan/tree_shapes.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::for_each_packing;
using testing::kIsSanitized;
using testing::kTreeShapes;
using testing::random_budget;
using testing::random_tree;
using testing::seeds;
using testing::test_seed;

/// The optimum by its definition, over all packings.
int64_t best_by_trying_all(const TokenTree& tree, int64_t budget) {
  const LeafPaths leaves = leaf_paths(tree);
  int64_t best = std::numeric_limits<int64_t>::max();
  for_each_packing(leaves.num_leaves(), [&](const LeafParts& parts) {
    const std::vector<int64_t> tokens = part_tokens(leaves, parts);
    if (std::ranges::any_of(tokens, [&](int64_t t) { return t > budget; })) return;
    best = std::min(best, total_tokens(leaves, parts));
  });
  return best;
}

TEST(MultiPath, OptimalAmongAllPackings) {
  int64_t budget_matters = 0;
  for (uint64_t seed = 0; seed < seeds(3000); ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(test_seed(seed), 64);
    TokenTree tree = random_tree(kTreeShapes[seed % 6], rng.between(1, 7), rng);
    if (rng.below(2) == 0) {  // many equal loads
      for (int64_t& size : tree.size) size = 1 + size % 3;
    }
    const int64_t budget = random_budget(tree, rng);
    const int64_t optimum = best_by_trying_all(tree, budget);
    const MultiPathPacking packing = pack_multi_path(tree, budget);
    ASSERT_EQ(packing.outcome, MultiPathOutcome::kSolved);
    ASSERT_EQ(packing.total_tokens, optimum);
    ASSERT_EQ(testing::parts_fault(tree, budget, packing.parts), "");
    ASSERT_EQ(total_tokens(leaf_paths(tree), packing.parts), optimum);
    ASSERT_LE(optimum, pack_single_path(tree, budget).total_tokens);

    const MultiPathPacking bounded = pack_multi_path(tree, budget, {.upper_bound = optimum});
    ASSERT_EQ(bounded.outcome, MultiPathOutcome::kSolved);
    ASSERT_EQ(bounded.total_tokens, optimum);
    ASSERT_EQ(pack_multi_path(tree, budget, {.upper_bound = optimum - 1}).outcome,
              MultiPathOutcome::kNothingWithinBound);
    budget_matters += pack_multi_path(tree, 2 * budget).total_tokens != optimum;
  }
  EXPECT_GT(budget_matters, kIsSanitized ? 0 : 500);  // negative control: another budget is another optimum
}

TEST(MultiPath, SharesNestedPaths) {
  const TokenTree tree{.parent = {-1, 0, 1, 1, 0}, .size = {1, 100, 1, 1, 1}};
  EXPECT_EQ(pack_multi_path(tree, 110).total_tokens, 104);
  EXPECT_EQ(pack_multi_path(tree, 103).total_tokens, 105);
  EXPECT_EQ(pack_multi_path(tree, 102).total_tokens, 206);
}

TEST(MultiPath, GivesUp) {
  Rng rng(test_seed(7), 65);
  const TokenTree tree = random_tree(testing::TreeShape::kWide, 20, rng);
  const int64_t budget = random_budget(tree, rng);
  EXPECT_EQ(pack_multi_path(tree, budget, {.work_limit = 100}).outcome, MultiPathOutcome::kGaveUp);
  EXPECT_EQ(pack_multi_path({}, 1).outcome, MultiPathOutcome::kSolved);
  // There are more parts than loads that a state may hold.
  TokenTree star{.parent = {-1}, .size = {1}};
  for (int64_t k = 0; k < 70; ++k) {
    star.parent.push_back(0);
    star.size.push_back(2);
  }
  EXPECT_EQ(pack_multi_path(star, 3).outcome, MultiPathOutcome::kGaveUp);
  EXPECT_EQ(pack_multi_path(star, 5, {.upper_bound = 35 * 5}).total_tokens, 35 * 5);
}

TEST(MultiPath, ChainOfAHundredThousandNodes) {
  TokenTree chain;
  for (int64_t n = 0; n < 100'000; ++n) {
    chain.parent.push_back(n - 1);
    chain.size.push_back(1);
  }
  const MultiPathPacking packing = pack_multi_path(chain, 100'000);
  EXPECT_EQ(packing.outcome, MultiPathOutcome::kSolved);
  EXPECT_EQ(packing.total_tokens, 100'000);
}

}  // namespace
}  // namespace espalier
