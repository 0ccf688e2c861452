// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/tree_heuristic.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <span>

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

/// Cost of a part that shares one path: L(u) plus residual paths, u the deepest node above all its leaves.
/// -1 when other leaves lie below u.
int64_t one_path_tokens(const LeafPaths& leaves, std::span<const int64_t> part) {
  if (part.back() - part.front() + 1 != static_cast<int64_t>(part.size())) return -1;
  int64_t shared = leaves.path[part.front()], flat = 0;
  for (const int64_t k : part) {
    flat += leaves.path[k];
    if (k != part.front()) shared = std::min(shared, leaves.shared[k]);
  }
  const bool before = part.size() > 1 && part.front() > 0 && leaves.shared[part.front()] >= shared;
  const bool after =
      part.size() > 1 && part.back() + 1 < leaves.num_leaves() && leaves.shared[part.back() + 1] >= shared;
  return before || after ? -1 : flat - (static_cast<int64_t>(part.size()) - 1) * shared;
}

int64_t best_of_one_prefix_each(const TokenTree& tree, int64_t budget) {
  const LeafPaths leaves = leaf_paths(tree);
  int64_t best = std::numeric_limits<int64_t>::max();
  for_each_packing(leaves.num_leaves(), [&](const LeafParts& parts) {
    int64_t total = 0;
    for (int64_t p = 0; p < parts.num_rows(); ++p) {
      const int64_t tokens = one_path_tokens(leaves, parts.row(p));
      if (tokens < 0 || tokens > budget) return;
      total += tokens;
    }
    best = std::min(best, total);
  });
  return best;
}

TEST(SinglePath, OptimalAmongOnePathPerPart) {
  int64_t budget_matters = 0;
  for (uint64_t seed = 0; seed < seeds(1200); ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(test_seed(seed), 63);
    const TokenTree tree = random_tree(kTreeShapes[seed % 6], rng.between(1, 7), rng);
    const LeafPaths leaves = leaf_paths(tree);
    const int64_t budget = random_budget(tree, rng);
    const SinglePathPacking packing = pack_single_path(tree, budget);
    ASSERT_EQ(packing.total_tokens, best_of_one_prefix_each(tree, budget));
    ASSERT_EQ(testing::parts_fault(tree, budget, packing.parts), "");
    int64_t total = 0;
    for (int64_t p = 0; p < packing.parts.num_rows(); ++p) {
      total += one_path_tokens(leaves, packing.parts.row(p));
    }
    ASSERT_EQ(packing.total_tokens, total);
    ASSERT_GE(packing.total_tokens, total_tokens(leaves, packing.parts));
    budget_matters += packing.total_tokens != best_of_one_prefix_each(tree, 2 * budget);
  }
  EXPECT_GT(budget_matters, kIsSanitized ? 0 : 200);  // negative control: another budget is another optimum
}

TEST(SinglePath, ResidualPathsAreNotShared) {
  // Root of 1; an inner node of 100 with two leaves of 1, and a leaf of 1: everything in one part would be
  // 104 tokens, but with the root as the one shared path the inner node counts twice.
  const TokenTree tree{.parent = {-1, 0, 1, 1, 0}, .size = {1, 100, 1, 1, 1}};
  const SinglePathPacking packing = pack_single_path(tree, 110);
  EXPECT_EQ(packing.total_tokens, 103 + 2);
  EXPECT_EQ(packing.parts.num_rows(), 2);
}

TEST(SinglePath, ChainOfAHundredThousandNodes) {
  TokenTree chain;
  for (int64_t n = 0; n < 100'000; ++n) {
    chain.parent.push_back(n - 1);
    chain.size.push_back(1);
  }
  const SinglePathPacking packing = pack_single_path(chain, 100'000);
  EXPECT_EQ(packing.total_tokens, 100'000);
  EXPECT_EQ(packing.parts.num_rows(), 1);
}

}  // namespace
}  // namespace espalier
