// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/leaf_parts.h"

#include <gtest/gtest.h>

#include "tests/plan/tree_shapes.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::kTreeShapes;
using testing::naive_part_tokens;
using testing::random_tree;
using testing::seeds;
using testing::test_seed;

/// Root of 10; a leaf of 1; an inner node of 5 with leaves of 2 and 3.
const TokenTree kSmall{.parent = {-1, 0, 0, 2, 2}, .size = {10, 1, 5, 2, 3}};

TEST(LeafParts, PathsOfASmallTree) {
  EXPECT_EQ(kSmall.num_tokens(), 21);
  EXPECT_EQ(path_lengths(kSmall), (std::vector<int64_t>{10, 11, 15, 17, 18}));
  const LeafPaths leaves = leaf_paths(kSmall);
  EXPECT_EQ(leaves.node, (std::vector<int64_t>{1, 3, 4}));
  EXPECT_EQ(leaves.path, (std::vector<int64_t>{11, 17, 18}));
  EXPECT_EQ(leaves.shared, (std::vector<int64_t>{0, 10, 15}));
}

TEST(LeafParts, PartsFromLabels) {
  const LeafParts parts = parts_from_labels({3, 0, 3, 1, 0});
  EXPECT_EQ(parts.offsets, (std::vector<int64_t>{0, 2, 4, 5}));
  EXPECT_EQ(parts.values, (std::vector<int64_t>{0, 2, 1, 4, 3}));
  EXPECT_EQ(parts_from_labels({}).num_rows(), 0);
}

TEST(LeafParts, TokensAreThoseOfTheUnion) {
  for (uint64_t seed = 0; seed < seeds(600); ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(test_seed(seed), 62);
    const TokenTree tree = random_tree(kTreeShapes[seed % 6], rng.between(1, 30), rng);
    const LeafPaths leaves = leaf_paths(tree);
    std::vector<int64_t> label(leaves.num_leaves());
    const int64_t num_labels = rng.between(1, leaves.num_leaves());
    for (int64_t& l : label) l = rng.below(num_labels);
    const LeafParts parts = parts_from_labels(label);
    const std::vector<int64_t> tokens = part_tokens(leaves, parts);
    int64_t total = 0;
    for (int64_t p = 0; p < parts.num_rows(); ++p) {
      ASSERT_EQ(tokens[p], naive_part_tokens(tree, {parts.row(p).begin(), parts.row(p).end()}));
      total += tokens[p];
    }
    ASSERT_EQ(total_tokens(leaves, parts), total);
    // Negative control: the count depends on every shared length.
    if (leaves.num_leaves() > parts.num_rows()) {
      LeafPaths wrong = leaves;
      for (int64_t& shared : wrong.shared) --shared;
      ASSERT_NE(total_tokens(wrong, parts), total);
    }
  }
}

TEST(LeafParts, PartsCheckSeesFaults) {
  EXPECT_EQ(testing::parts_fault(kSmall, 20, parts_from_labels({0, 1, 1})), "");
  EXPECT_NE(testing::parts_fault(kSmall, 19, parts_from_labels({0, 1, 1})), "");
  EXPECT_NE(testing::parts_fault(kSmall, 20, {.offsets = {0, 1, 2}, .values = {0, 1}}), "");
  EXPECT_NE(testing::parts_fault(kSmall, 20, {.offsets = {0, 2, 4}, .values = {0, 1, 1, 2}}), "");
}

TEST(LeafParts, EveryPackingOnce) {
  constexpr int64_t kBell[] = {1, 1, 2, 5, 15, 52, 203, 877};
  for (int64_t n = 1; n <= 7; ++n) {
    int64_t count = 0;
    testing::for_each_packing(n, [&](const LeafParts&) { ++count; });
    EXPECT_EQ(count, kBell[n]);
  }
}

}  // namespace
}  // namespace espalier
