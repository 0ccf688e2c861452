// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cuda/attention/tile_schedule.h"

#include <gtest/gtest.h>

#include "tests/ops/kernels/cpu/attention/tile_counts.h"
#include "tests/ops/kernels/cuda/attention/attention_problems.h"
#include "tests/ops/kernels/cuda/emulator.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using cuda::TileSchedule;
using cuda::TileWalk;
using testing::EmulatedSchedule;
using testing::ForestShape;
using testing::kIsSanitized;
using testing::seeds;
using testing::test_seed;

using Problem = testing::ScheduleProblem;

Problem random_problem(uint64_t seed) {
  std::mt19937_64 random(test_seed(seed));
  return testing::random_schedule_problem(random, static_cast<ForestShape>(seed % testing::kNumForestShapes),
                                          20);
}

bool same(const KeyBlock& a, const KeyBlock& b) {
  return a.segment == b.segment && a.begin == b.begin && a.end == b.end && a.query_begin == b.query_begin &&
         a.query_end == b.query_end && a.full_begin == b.full_begin && a.full_end == b.full_end;
}

/// Tiles of a query block by key block: those that the walk meets.
std::vector<TileClass> walk(const TileSchedule& schedule, int32_t query_block) {
  std::vector<TileClass> classes(schedule.inputs.num_key_blocks(), TileClass::kEmpty);
  for (TileWalk walk(schedule, query_block); !walk.done(); walk.advance()) {
    EXPECT_EQ(classes[walk.index()], TileClass::kEmpty) << "twice";
    classes[walk.index()] =
        classify(walk.block(), schedule.query_begin(query_block), schedule.query_end(query_block));
    EXPECT_NE(classes[walk.index()], TileClass::kEmpty);
  }
  return classes;
}

/// Walks that differ from the lists of the CPU's schedule, and blocks and orders that do.
int64_t differences(const Schedule& expected, const TileSchedule& schedule) {
  int64_t wrong = 0;
  for (size_t k = 0; k < expected.key_blocks.size(); ++k) {
    wrong += !same(expected.key_blocks[k], schedule.key_blocks[k].block);
  }
  for (int32_t q = 0; q < expected.num_query_blocks(); ++q) {
    std::vector<TileClass> listed(expected.key_blocks.size(), TileClass::kEmpty);
    for (const Tile& tile : expected.tiles.row(q)) {
      listed[tile.key_block] = tile.full ? TileClass::kFull : TileClass::kPartial;
    }
    wrong += walk(schedule, q) != listed;
    wrong += expected.query_order[q] != schedule.query_order[q];
  }
  return wrong;
}

TEST(TileScheduleTest, IsThatOfTheCpu) {
  testing::TileCounts total;
  int64_t context_tiles = 0;
  for (uint64_t seed = 0; seed < seeds(250); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Problem problem = random_problem(seed);
    const Schedule expected = make_schedule(problem.ends, problem.context, problem.sizes);
    const EmulatedSchedule emulated(problem.ends, problem.context, problem.sizes, seed);
    ASSERT_EQ(differences(expected, emulated.schedule), 0);
    total.add(expected);
    for (const Tile& tile : expected.tiles.values) {
      context_tiles += expected.key_blocks[tile.key_block].segment >= 0;
    }
  }
  EXPECT_GT(total.empty, 1000);
  EXPECT_GT(total.partial, 1000);
  EXPECT_GT(total.full, 1000);
  EXPECT_GT(context_tiles, 1000);
}

// Key blocks are seen by one contiguous range of query blocks, which backward passes loop over.
TEST(TileScheduleTest, QueryBlocksOfAKeyBlockAreContiguous) {
  for (uint64_t seed = 0; seed < seeds(300); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Problem problem = random_problem(seed);
    const Schedule schedule = make_schedule(problem.ends, problem.context, problem.sizes);
    const auto query_blocks = testing::query_blocks_of_keys(schedule);
    for (size_t k = 0; k < schedule.key_blocks.size(); ++k) {
      const KeyBlock& block = schedule.key_blocks[k];
      const int32_t first = block.query_begin / problem.sizes.queries;
      const int32_t last = (block.query_end - 1) / problem.sizes.queries;
      ASSERT_EQ(query_blocks[k].size(), static_cast<size_t>(last - first + 1));
    }
  }
}

// Longer than a warp looks at at once.
TEST(TileScheduleTest, OfManyBlocks) {
  for (uint64_t seed = 0; seed < 7; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(test_seed(seed));
    const auto shape = static_cast<ForestShape>(seed % testing::kNumForestShapes);
    const std::vector<int32_t> ends = testing::random_subtree_end(random, shape, 300, 8);
    const auto context = testing::random_rectangles(random, ends.size(), 40, 60);
    const BlockSizes sizes{3, 2};
    const EmulatedSchedule emulated(ends, context, sizes, seed);
    ASSERT_EQ(differences(make_schedule(ends, context, sizes), emulated.schedule), 0);
  }
}

TEST(TileScheduleTest, OfNothing) {
  const EmulatedSchedule emulated({}, {}, {8, 8}, 0);
  EXPECT_EQ(emulated.schedule.inputs.num_key_blocks(), 0);
}

TEST(TileScheduleTest, NegativeControlsAreNoticed) {
  int64_t cut = 0;
  for (uint64_t seed = 0; seed < seeds(60); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Problem problem = random_problem(seed);
    const Schedule expected = make_schedule(problem.ends, problem.context, problem.sizes);
    const EmulatedSchedule emulated(problem.ends, problem.context, problem.sizes, seed);
    for (int32_t q = 0; q < expected.num_query_blocks(); ++q) {
      const cuda::KeyList& list = emulated.schedule.lists[q].forest;
      if (list.chain < 0 || emulated.schedule.key_blocks[list.chain].previous < 0) continue;
      const int32_t right = std::exchange(emulated.schedule.key_blocks[list.chain].previous, -1);
      ASSERT_GT(differences(expected, emulated.schedule), 0);
      emulated.schedule.key_blocks[list.chain].previous = right;
      ++cut;
    }
  }
  EXPECT_GT(cut, kIsSanitized ? 0 : 50);
}

}  // namespace
}  // namespace espalier
