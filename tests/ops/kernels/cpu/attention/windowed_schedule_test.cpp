// SPDX-License-Identifier: Apache-2.0
// The tiles and the chunks of keys of attention with a sliding window, pair by pair.
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <tuple>

#include "espalier/ops/kernels/cpu/attention/tree_attention_tile.h"
#include "tests/ops/attention/random_subtrees.h"
#include "tests/ops/kernels/cpu/attention/tile_counts.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::ForestShape;
using testing::random_subtree_end;
using testing::seeds;
using testing::test_seed;

/// A forest below a context of one segment, whose keys are before it on the path.
struct Problem {
  std::vector<int32_t> ends, positions, context_positions;
  std::vector<ContextRectangle> context;
  BlockSizes sizes;
  int32_t window;

  explicit Problem(uint64_t seed) {
    std::mt19937_64 random(test_seed(seed));
    const auto between = [&](int low, int high) {
      return std::uniform_int_distribution<int32_t>(low, high)(random);
    };
    ends = random_subtree_end(random, static_cast<ForestShape>(seed % testing::kNumForestShapes), 20, 6);
    const auto tokens = static_cast<int32_t>(ends.size());
    const int32_t above = between(0, 20);
    for (int32_t i = 0; i < above; ++i) context_positions.push_back(i);
    if (above > 0) context.push_back({0, 0, above, 0, tokens});
    positions.assign(tokens, above - 1);
    for (int32_t j = 0; j < tokens; ++j) {
      for (int32_t i = 0; i <= j; ++i) positions[j] += testing::visible(ends, j, i);
    }
    sizes = {between(1, 9), between(1, 9)};
    window = between(1, 30);
  }

  Schedule schedule() {
    segments_ = {context_positions.data()};
    return make_schedule(ends, context, sizes, {window, positions.data(), segments_});
  }

  bool sees(int32_t segment, int32_t query, int32_t key) const {
    const int32_t position = segment < 0 ? positions[key] : context_positions[key];
    return (segment >= 0 || testing::visible(ends, query, key)) && positions[query] - position < window;
  }

 private:
  std::vector<const int32_t*> segments_;
};

/// Pairs of a tile that are visible, and all of them.
std::pair<int64_t, int64_t> pairs_of(const Problem& problem, const Schedule& schedule, int32_t query_block,
                                     const KeyBlock& block) {
  int64_t visible = 0, all = 0;
  for (int32_t j = schedule.query_begin(query_block); j < schedule.query_end(query_block); ++j) {
    for (int32_t i = block.begin; i < block.end; ++i, ++all) visible += problem.sees(block.segment, j, i);
  }
  return {visible, all};
}

TEST(WindowedSchedule, ListsWhatHasVisiblePairs) {
  testing::TileCounts total;
  for (uint64_t seed = 0; seed < seeds(1000); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Problem problem(seed);
    const Schedule schedule = problem.schedule();
    for (int32_t q = 0; q < schedule.num_query_blocks(); ++q) {
      std::map<int32_t, bool> listed;
      for (const Tile& tile : schedule.tiles.row(q)) listed[tile.key_block] = tile.full;
      for (size_t k = 0; k < schedule.key_blocks.size(); ++k) {
        const auto [visible, all] = pairs_of(problem, schedule, q, schedule.key_blocks[k]);
        const auto found = listed.find(static_cast<int32_t>(k));
        ASSERT_EQ(found != listed.end(), visible > 0);
        ASSERT_TRUE(visible == 0 || found->second == (visible == all));
      }
    }
    total.add(schedule);
  }
  EXPECT_GT(total.empty, 1000);
  EXPECT_GT(total.partial, 1000);
  EXPECT_GT(total.full, 1000);
}

TEST(WindowedSchedule, SkipsTilesOutsideEveryWindow) {
  const std::vector<int32_t> ends(1024, 1024);
  std::vector<int32_t> positions(1024);
  for (int32_t i = 0; i < 1024; ++i) positions[i] = i;
  const Schedule schedule = make_schedule(ends, {}, {64, 64}, {100, positions.data()});
  // The block itself, the one before, and that before the latter.
  EXPECT_EQ(schedule.tiles.values.size(), 16 + 15 + 14);
  EXPECT_EQ(testing::TileCounts::of(make_schedule(ends, {}, {64, 64})).empty, 16 * 15 / 2);
}

using Pair = std::tuple<int32_t, int32_t, int32_t>;  // segment, query, key

/// How often each pair is in a chunk. Fails where a chunk is too long or a tile is not finished once, in
/// order.
std::map<Pair, int> pairs_in_chunks(const Problem& problem, const Schedule& schedule, int32_t group) {
  std::map<Pair, int> counts;
  KeyChunks chunks(schedule, problem.ends.data(), group);
  for (int32_t q = 0; q < schedule.num_query_blocks(); ++q) {
    const Tile* next = schedule.tiles.row(q).data();
    const int32_t begin = schedule.query_begin(q);
    for (chunks.start(q); chunks.next();) {
      const KeyChunk& chunk = chunks.chunk();
      EXPECT_LE(chunk.num_keys(), kMaxChunkKeys);
      EXPECT_GT(chunk.num_keys(), 0);
      EXPECT_EQ(chunk.tiles.data(), next);
      next += chunk.num_finished;
      int32_t c = 0;
      for (const KeySpan& range : chunk.ranges) {
        for (int32_t i = 0; i < range.count; ++i, ++c) {
          const RowRange rows = chunk.visible[c];
          EXPECT_TRUE(chunk.rows.begin <= rows.begin && rows.end <= chunk.rows.end);
          for (int32_t r = rows.begin; r < rows.end; r += group) {
            ++counts[{range.segment - 1, begin + r / group, range.begin + i}];
          }
        }
      }
      EXPECT_EQ(c, chunk.num_keys());
    }
    EXPECT_EQ(next, schedule.tiles.row(q).data() + schedule.tiles.row(q).size());
  }
  return counts;
}

std::map<Pair, int> visible_pairs(const Problem& problem) {
  std::map<Pair, int> counts;
  const auto tokens = static_cast<int32_t>(problem.ends.size());
  for (int32_t j = 0; j < tokens; ++j) {
    for (int32_t i = 0; i <= j; ++i) {
      if (problem.sees(-1, j, i)) counts[{-1, j, i}] = 1;
    }
    for (size_t i = 0; i < problem.context_positions.size(); ++i) {
      const auto key = static_cast<int32_t>(i);
      if (problem.sees(0, j, key)) counts[{0, j, key}] = 1;
    }
  }
  return counts;
}

TEST(WindowedSchedule, ChunksHoldEveryVisiblePairOnce) {
  for (uint64_t seed = 0; seed < seeds(500); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Problem problem(seed);
    ASSERT_EQ(pairs_in_chunks(problem, problem.schedule(), 1 + static_cast<int32_t>(seed % 3)),
              visible_pairs(problem));
  }
}

// A stem of 64 tokens with 32 leaves of four: with most windows the last tokens of a leaf no longer see keys
// that the first ones see, and a key block has more ranges of queries than a chunk has room for.
TEST(WindowedSchedule, KeysOfABlockMayTakeSeveralChunks) {
  Problem problem(0);
  problem.context.clear();
  problem.context_positions.clear();
  problem.ends.assign(64, 64 + 128);
  problem.positions.clear();
  for (int32_t i = 0; i < 64; ++i) problem.positions.push_back(i);
  for (int32_t leaf = 0; leaf < 32; ++leaf) {
    for (int32_t i = 0; i < 4; ++i) {
      problem.ends.push_back(64 + 4 * leaf + 4);
      problem.positions.push_back(64 + i);
    }
  }
  problem.sizes = {192, 64};
  size_t several = 0;
  for (const int32_t window : {1, 2, 3, 33, 64, 65, 66}) {
    problem.window = window;
    const Schedule schedule = problem.schedule();
    ASSERT_EQ(pairs_in_chunks(problem, schedule, 1), visible_pairs(problem));
    KeyChunks chunks(schedule, problem.ends.data(), 1);
    for (chunks.start(0); chunks.next();)
      several += chunks.chunk().num_finished < chunks.chunk().tiles.size();
  }
  EXPECT_GT(several, 0);
}

}  // namespace
}  // namespace espalier
