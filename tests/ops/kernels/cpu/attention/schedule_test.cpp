// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cpu/attention/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "espalier/base/check.h"
#include "tests/ops/attention/random_subtrees.h"
#include "tests/ops/kernels/cpu/attention/tile_counts.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::ForestShape;
using testing::random_subtree_end;
using testing::seeds;
using testing::test_seed;
using Ends = std::vector<int32_t>;

struct Problem {
  Ends ends;
  std::vector<ContextRectangle> context;
  BlockSizes sizes;
};

Problem random_problem(uint64_t seed) {
  std::mt19937_64 random(test_seed(seed));
  const auto between = [&](int low, int high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random);
  };
  Problem problem;
  problem.ends =
      random_subtree_end(random, static_cast<ForestShape>(seed % testing::kNumForestShapes), 20, 6);
  const auto tokens = static_cast<int32_t>(problem.ends.size());
  for (int32_t segment = 0; segment < between(0, 3); ++segment) {
    const int32_t begin = between(0, tokens - 1), key = between(0, 3);
    problem.context.push_back({segment, key, key + between(1, 20), begin, between(begin + 1, tokens)});
  }
  problem.sizes = {between(1, 9), between(1, 9)};
  return problem;
}

bool sees(const Problem& problem, const KeyBlock& block, int32_t query, int32_t key) {
  if (block.segment < 0) return testing::visible(problem.ends, query, key);
  for (const ContextRectangle& r : problem.context) {
    if (r.segment == block.segment && r.key_begin <= key && key < r.key_end) {
      return r.query_begin <= query && query < r.query_end;
    }
  }
  return false;
}

/// What is in a tile, pair by pair.
TileClass count_pairs(const Problem& problem, const KeyBlock& block, int32_t query_begin, int32_t query_end) {
  int64_t visible = 0;
  for (int32_t j = query_begin; j < query_end; ++j) {
    for (int32_t i = block.begin; i < block.end; ++i) visible += sees(problem, block, j, i);
  }
  if (visible == 0) return TileClass::kEmpty;
  const int64_t all = static_cast<int64_t>(query_end - query_begin) * block.num_keys();
  return visible == all ? TileClass::kFull : TileClass::kPartial;
}

/// The tiles whose class is not what the pairs say; lists are taken at their word.
int64_t wrong_tiles(const Problem& problem, const Schedule& schedule) {
  int64_t wrong = 0;
  for (int32_t q = 0; q < schedule.num_query_blocks(); ++q) {
    std::vector<TileClass> listed(schedule.key_blocks.size(), TileClass::kEmpty);
    for (const Tile& tile : schedule.tiles.row(q)) {
      wrong += listed[tile.key_block] != TileClass::kEmpty;  // twice
      listed[tile.key_block] = tile.full ? TileClass::kFull : TileClass::kPartial;
    }
    for (size_t k = 0; k < schedule.key_blocks.size(); ++k) {
      wrong += listed[k] !=
               count_pairs(problem, schedule.key_blocks[k], schedule.query_begin(q), schedule.query_end(q));
    }
  }
  return wrong;
}

bool is_order(const std::vector<int32_t>& order, size_t size) {
  const std::set<int32_t> all(order.begin(), order.end());
  return order.size() == size && all.size() == size &&
         (size == 0 || (*all.begin() == 0 && *all.rbegin() == static_cast<int32_t>(size) - 1));
}

TEST(Schedule, ClassifiesEveryTileOfRandomForests) {
  testing::TileCounts total;
  for (uint64_t seed = 0; seed < seeds(3000); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Problem problem = random_problem(seed);
    const Schedule schedule = make_schedule(problem.ends, problem.context, problem.sizes);
    ASSERT_EQ(wrong_tiles(problem, schedule), 0);
    total.add(schedule);
  }
  EXPECT_GT(total.empty, 1000);
  EXPECT_GT(total.partial, 1000);
  EXPECT_GT(total.full, 1000);
}

TEST(Schedule, TilesOfAKeyBlockTakeTurnsInTheOrderOfQueryBlocks) {
  for (uint64_t seed = 0; seed < seeds(500); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Problem problem = random_problem(seed);
    const Schedule schedule = make_schedule(problem.ends, problem.context, problem.sizes);
    ASSERT_TRUE(is_order(schedule.query_order, schedule.tiles.num_rows()));
    const auto query_blocks = testing::query_blocks_of_keys(schedule);
    for (int32_t q = 0; q < schedule.num_query_blocks(); ++q) {
      for (const Tile& tile : schedule.tiles.row(q)) {
        ASSERT_EQ(query_blocks[tile.key_block].at(tile.turn), q);
      }
    }
  }
}

TEST(Schedule, LongestComeFirst) {
  const Schedule chain = make_schedule(Ends(64, 64), {}, {8, 8});
  EXPECT_EQ(chain.query_order, (std::vector<int32_t>{7, 6, 5, 4, 3, 2, 1, 0}));
  const auto counts = testing::TileCounts::of(chain);
  EXPECT_EQ(counts.partial, 8);
  EXPECT_EQ(counts.full, 28);
  EXPECT_EQ(counts.empty, 28);
  EXPECT_EQ(chain.num_pairs, 36 * 64);
}

// The lists of a star are as long as its tokens are many, not their square.
TEST(Schedule, OfAWideStarIsShort) {
  constexpr int32_t kLeaves = 10'000, kLeafTokens = 40, kRoot = 64;
  constexpr int32_t kTokens = kRoot + kLeaves * kLeafTokens;
  Ends ends(kTokens, kTokens);
  for (int32_t i = kRoot; i < kTokens; ++i) ends[i] = kRoot + ((i - kRoot) / kLeafTokens + 1) * kLeafTokens;
  const Schedule schedule = make_schedule(ends, {}, {32, 64});
  EXPECT_EQ(schedule.num_query_blocks(), 12'502);
  EXPECT_LT(schedule.tiles.values.size(), 4 * 12'502u);
  EXPECT_GT(testing::TileCounts::of(schedule).empty, 70'000'000);
}

TEST(Schedule, OfNothingIsEmpty) {
  const Schedule schedule = make_schedule(Ends{}, {}, {8, 8});
  EXPECT_EQ(schedule.num_query_blocks(), 0);
  EXPECT_TRUE(schedule.key_blocks.empty());
}

TEST(Schedule, RefusesWhatIsNoForest) {
  for (const Ends& ends : {Ends{0}, Ends{2}, Ends{3, 1, 3}, Ends{2, 3, 3}, Ends{4, 3, 4, 4}, Ends{-1, 2}}) {
    EXPECT_THROW(make_schedule(ends, {}, {8, 8}), InputError);
  }
}

TEST(Schedule, NegativeControlsAreNoticed) {
  int64_t promoted = 0, demoted = 0, dropped = 0;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const Problem problem = random_problem(seed);
    const Schedule right = make_schedule(problem.ends, problem.context, problem.sizes);
    for (size_t t = 0; t < right.tiles.values.size(); ++t) {
      Schedule wrong = right;
      wrong.tiles.values[t].full = !wrong.tiles.values[t].full;
      ++(right.tiles.values[t].full ? demoted : promoted);
      ASSERT_EQ(wrong_tiles(problem, wrong), 1);
    }
    Schedule shorter = right;
    shorter.tiles.values.pop_back();
    --shorter.tiles.offsets.back();
    ++dropped;
    ASSERT_EQ(wrong_tiles(problem, shorter), 1);
  }
  EXPECT_GT(promoted, 50);
  EXPECT_GT(demoted, 50);
  EXPECT_EQ(dropped, 50);
}

}  // namespace
}  // namespace espalier
