// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/visible_intervals.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <bit>
#include <numeric>

#include "espalier/base/check.h"
#include "espalier/plan/partition.h"
#include "espalier/tree/synth.h"
#include "tests/base/message_of.h"
#include "tests/test_seed.h"
#include "tests/tree/naive.h"

namespace espalier {
namespace {

using testing::make_rows;
using testing::message_of;
using testing::seeds;
using testing::test_seed;

/// By the definition of the form: f0, then pairs.
bool sees(const VisibleIntervals& intervals, int64_t num_tokens, int64_t query, int64_t key) {
  const auto bound = [&](int64_t row) { return intervals.bounds[row * num_tokens + query]; };
  if (key < bound(0)) return true;
  for (int64_t row = 1; row < intervals.num_bounds; row += 2) {
    if (bound(row) <= key && key < bound(row + 1)) return true;
  }
  return false;
}

/// Pair by pair, context and window included, by the arrays that operators take. "" or the first fault.
std::string fault(const AttentionMask& mask) {
  const VisibleIntervals intervals = visible_intervals(mask);
  const int64_t num_tokens = std::ssize(mask.subtree_end);
  if (intervals.num_bounds % 2 == 0) return "an even number of bounds";
  if (std::ssize(intervals.bounds) != intervals.num_bounds * num_tokens) return "a wrong size";
  for (int64_t i = 0; i < num_tokens; ++i) {
    for (int64_t row = 1; row < intervals.num_bounds; ++row) {
      if (intervals.bounds[row * num_tokens + i] < intervals.bounds[(row - 1) * num_tokens + i])
        return "a decrease";
    }
    const auto near = [&](int64_t position) {
      return mask.sliding_window == 0 || mask.position[i] - position < mask.sliding_window;
    };
    int64_t key = 0;
    for (const ContextBlock& block : mask.context) {
      for (int64_t column = block.column_begin; column < block.column_end; ++column, ++key) {
        const bool expected =
            block.row_begin <= i && i < block.row_end && near(block.position + column - block.column_begin);
        if (sees(intervals, num_tokens, i, key) != expected)
          return fmt::format("token {}, context key {}", i, key);
      }
    }
    for (int64_t j = 0; j < num_tokens; ++j, ++key) {
      const bool expected = j <= i && i < mask.subtree_end[j] && near(mask.position[j]);
      if (sees(intervals, num_tokens, i, key) != expected) return fmt::format("token {}, key {}", i, j);
    }
  }
  return "";
}

/// The largest number of intervals of a token that are not empty.
int64_t most_intervals(const VisibleIntervals& intervals) {
  const int64_t num_tokens = std::ssize(intervals.bounds) / intervals.num_bounds;
  int64_t most = 0;
  for (int64_t i = 0; i < num_tokens; ++i) {
    int64_t count = intervals.bounds[i] > 0;
    for (int64_t row = 1; row < intervals.num_bounds; row += 2) {
      count += intervals.bounds[(row + 1) * num_tokens + i] > intervals.bounds[row * num_tokens + i];
    }
    most = std::max(most, count);
  }
  return most;
}

AttentionMask mask_of(const Layout& layout) {
  return {.subtree_end = layout.subtree_end, .position = layout.position_ids};
}

TEST(VisibleIntervals, OfAHandMadeForest) {
  const Forest forest = build_forest(make_rows({{1, 2, 3, 4}, {1, 2, 5}, {9, 8}}).view());
  const Layout layout = make_layout(forest, whole_forest(forest));  // 1 2 | 3 4 | 5 | 9 8
  const VisibleIntervals all = visible_intervals(mask_of(layout));
  EXPECT_EQ(all.num_bounds, 3);
  EXPECT_EQ(all.bounds, (std::vector<int32_t>{1, 2, 3, 4, 2, 0, 0,  //
                                              1, 2, 3, 4, 4, 5, 5,  //
                                              1, 2, 3, 4, 5, 6, 7}));
  AttentionMask windowed = mask_of(layout);
  windowed.sliding_window = 2;
  EXPECT_EQ(visible_intervals(windowed).bounds, (std::vector<int32_t>{1, 2, 0, 0, 0, 0, 0,  //
                                                                      1, 2, 1, 2, 1, 5, 5,  //
                                                                      1, 2, 3, 4, 2, 6, 7,  //
                                                                      1, 2, 3, 4, 4, 6, 7,  //
                                                                      1, 2, 3, 4, 5, 6, 7}));
}

TEST(VisibleIntervals, AreTheMaskOfRandomForestsAndTheirMicroBatches) {
  for (uint64_t seed = 0; seed < seeds(500); ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(test_seed(seed), 63);
    const auto order = rng.uniform() < 0.5 ? ChildOrder::kFirstReached : ChildOrder::kMostLeavesFirst;
    const Forest forest = build_forest(testing::random_rows(rng).view(), {}, order);
    for (const Merge merge : {Merge::kNone, Merge::kAll}) {
      const auto batches = partition(forest, rng.between(1, forest.tree_tokens()), merge);
      const ContextIndex index(batches);
      for (size_t m = 0; m < batches.size(); ++m) {
        const Layout layout = make_layout(forest, batches[m].runs, RootRuns::kContinueContext);
        const auto context = context_blocks(index, static_cast<int64_t>(m));
        AttentionMask mask = mask_of(layout);
        mask.context = context;
        for (const int64_t window : {int64_t{0}, int64_t{1}, rng.between(2, 8)}) {
          mask.sliding_window = window;
          ASSERT_EQ(fault(mask), "") << "micro-batch " << m << ", window " << window;
        }
      }
    }
  }
}

TEST(VisibleIntervals, AreFewWhereTheChildWithMostLeavesIsFirst) {
  for (uint64_t seed = 0; seed < seeds(300); ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(test_seed(seed), 64);
    const testing::Rows rows = testing::random_rows(rng);
    const Forest forest = build_forest(rows.view(), {}, ChildOrder::kMostLeavesFirst);
    std::vector<int64_t> leaves(forest.num_nodes(), 0);
    uint64_t most_leaves = 1;
    for (int64_t n = forest.num_nodes() - 1; n >= 0; --n) {
      if (forest.subtree_last[n] == n + 1) leaves[n] = 1;
      if (forest.parent[n] < 0) {
        most_leaves = std::max(most_leaves, static_cast<uint64_t>(leaves[n]));
      } else {
        leaves[forest.parent[n]] += leaves[n];
      }
    }
    const VisibleIntervals intervals = visible_intervals(mask_of(make_layout(forest, whole_forest(forest))));
    EXPECT_LE(most_intervals(intervals), std::bit_width(most_leaves));  // 1 + floor(log2(leaves))
  }
}

// Every node has a leaf first and everything else second: in that order a path takes a second child at each
// level.
TEST(VisibleIntervals, OfACaterpillarNeedTheOrderOfChildren) {
  constexpr int32_t kDepth = 40;
  std::vector<std::vector<int32_t>> rows;
  for (int32_t level = 0; level < kDepth; ++level) {
    std::vector<int32_t> row(level + 1);
    std::iota(row.begin(), row.end(), 100);
    row.push_back(1);
    rows.push_back(row);
  }
  const auto most = [&](ChildOrder order) {
    const Forest forest = build_forest(make_rows(rows).view(), {}, order);
    return most_intervals(visible_intervals(mask_of(make_layout(forest, whole_forest(forest)))));
  };
  EXPECT_EQ(most(ChildOrder::kFirstReached), kDepth);
  EXPECT_EQ(most(ChildOrder::kMostLeavesFirst), 2);
}

// The tree of NVIDIA's benchmark of cudnn.flex_attention (`tree_dfs`: binary, 127 nodes) has 64 leaves.
TEST(VisibleIntervals, OfABinaryTree) {
  const auto sequences = synthesize({.depth = 7, .branching = 2, .node_length = 9, .seed = test_seed(0)});
  const Forest forest = testing::forest_of(sequences);
  ASSERT_EQ(forest.num_nodes(), 127);
  const Layout layout = make_layout(forest, whole_forest(forest));
  EXPECT_EQ(fault(mask_of(layout)), "");
  EXPECT_EQ(most_intervals(visible_intervals(mask_of(layout))), 7);
}

TEST(VisibleIntervals, RefuseWhatDoesNotFit) {
  const std::vector<int32_t> ends{2, 2};
  EXPECT_EQ(message_of<InputError>(
                [&] { visible_intervals({.subtree_end = ends, .position = {}, .sliding_window = 3}); }),
            "position: expected 2 numbers (one per token), received 0");
  const std::vector<ContextBlock> beyond{{0, 0, 4, 1, 3, 0}};
  EXPECT_NE(message_of<InputError>([&] {
              visible_intervals({.subtree_end = ends, .position = {}, .context = beyond});
            }).find("received keys [0, 4) for tokens [1, 3)"),
            std::string::npos);
}

}  // namespace
}  // namespace espalier
