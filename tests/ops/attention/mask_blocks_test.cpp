// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/attention/mask_blocks.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "espalier/base/check.h"
#include "tests/base/message_of.h"
#include "tests/ops/attention/random_subtrees.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::ForestShape;
using testing::random_subtree_end;
using testing::test_seed;
using Ends = std::vector<int32_t>;

// Whether the blocks cover every visible (row, column) once and nothing else.
bool covers_exactly(const std::vector<std::vector<MaskBlock>>& levels, const Ends& ends) {
  std::vector<std::vector<int>> count(ends.size(), std::vector<int>(ends.size()));
  for (const auto& level : levels) {
    for (const MaskBlock& block : level) {
      for (int64_t j = block.row_begin; j < block.row_end; ++j) {
        for (int64_t i = block.column_begin; i < block.column_end; ++i)
          count[j][i] += !block.causal || i <= j;
      }
    }
  }
  for (int64_t j = 0; j < std::ssize(ends); ++j) {
    for (int64_t i = 0; i < std::ssize(ends); ++i) {
      if (count[j][i] != testing::visible(ends, j, i)) return false;
    }
  }
  return true;
}

// Whether no two blocks of a level share a row or a column.
bool levels_are_disjoint(const std::vector<std::vector<MaskBlock>>& levels) {
  for (const auto& level : levels) {
    for (size_t p = 1; p < level.size(); ++p) {
      if (level[p].row_begin < level[p - 1].row_end) return false;
      if (level[p].column_begin < level[p - 1].column_end) return false;
    }
  }
  return true;
}

TEST(MaskBlocks, OfAStarAreOneRectangleAndTriangles) {
  const auto levels = mask_blocks_by_level(Ends{7, 7, 4, 4, 7, 7, 7});
  ASSERT_EQ(levels.size(), 2u);
  EXPECT_EQ(levels[0], (std::vector<MaskBlock>{{0, 2, 0, 2, true}, {2, 4, 2, 4, true}, {4, 7, 4, 7, true}}));
  EXPECT_EQ(levels[1], (std::vector<MaskBlock>{{2, 7, 0, 2, false}}));
}

TEST(MaskBlocks, OfAChainAreOneTriangleWhereverNodesEnd) {
  const auto levels = mask_blocks_by_level(Ends(9, 9));
  ASSERT_EQ(levels.size(), 1u);
  EXPECT_EQ(levels[0], (std::vector<MaskBlock>{{0, 9, 0, 9, true}}));
}

TEST(MaskBlocks, OfNothingAreNone) {
  EXPECT_TRUE(mask_blocks_by_level(Ends{}).empty());
}

TEST(MaskBlocks, CoverTheMaskOnceInRandomForests) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(test_seed(seed));
    const Ends ends =
        random_subtree_end(random, static_cast<ForestShape>(seed % testing::kNumForestShapes), 14, 4);
    const auto levels = mask_blocks_by_level(ends);
    ASSERT_TRUE(covers_exactly(levels, ends));
    ASSERT_TRUE(levels_are_disjoint(levels));
  }
}

TEST(MaskBlocks, NegativeControlsAreNoticed) {
  const Ends ends{7, 7, 4, 4, 7, 7, 7};
  auto dropped = mask_blocks_by_level(ends);
  dropped[1].clear();
  EXPECT_FALSE(covers_exactly(dropped, ends));
  auto longer = mask_blocks_by_level(ends);
  longer[0][1].column_begin -= 1;
  EXPECT_FALSE(covers_exactly(longer, ends));
  auto leaking = mask_blocks_by_level(ends);
  leaking.push_back({{4, 7, 2, 4, false}});
  EXPECT_FALSE(covers_exactly(leaking, ends));
  auto crowded = mask_blocks_by_level(ends);
  crowded[0].push_back(crowded[1][0]);
  EXPECT_FALSE(levels_are_disjoint(crowded));
}

TEST(MaskBlocks, RefuseWhatIsNoForest) {
  EXPECT_THROW(mask_blocks_by_level(Ends{0}), InputError);           // empty subtree
  EXPECT_THROW(mask_blocks_by_level(Ends{2}), InputError);           // beyond the tokens
  EXPECT_THROW(mask_blocks_by_level(Ends{3, 1, 3}), InputError);     // ends before itself
  EXPECT_THROW(mask_blocks_by_level(Ends{2, 3, 3}), InputError);     // a child outlives its parent
  EXPECT_THROW(mask_blocks_by_level(Ends{4, 3, 4, 4}), InputError);  // the same, deeper
  EXPECT_THROW(mask_blocks_by_level(Ends{-1, 2}), InputError);
  EXPECT_EQ(testing::message_of<InputError>([] { mask_blocks_by_level(Ends{5, 3, 4, 5, 5}); }),
            "subtree_end[2]: expected a value in [3, 3] (a subtree lies inside its parent's), received 4");
}

}  // namespace
}  // namespace espalier
