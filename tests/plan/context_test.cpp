// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/context.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <tuple>

#include "espalier/base/check.h"
#include "espalier/plan/partition.h"
#include "espalier/tree/synth.h"
#include "tests/test_seed.h"
#include "tests/tree/naive.h"

namespace espalier {
namespace {

using testing::make_rows;
using testing::seeds;
using testing::test_seed;

using AllPieces = std::vector<std::vector<ContextBlock>>;  // of each micro-batch

AllPieces all_blocks(const std::vector<MicroBatch>& batches) {
  const ContextIndex index(batches);
  AllPieces blocks;
  for (size_t m = 0; m < batches.size(); ++m)
    blocks.push_back(context_blocks(index, static_cast<int64_t>(m)));
  return blocks;
}

/// seen[j][i]: token i is on the root path of token j, both of the forest.
std::vector<std::vector<int>> visibility(const Forest& forest) {
  std::vector<std::vector<int>> seen(forest.tree_tokens(), std::vector<int>(forest.tree_tokens(), 0));
  for (int64_t j = 0; j < forest.tree_tokens(); ++j) {
    for (int64_t i = j; i >= 0; i = token_before(forest, i)) seen[j][i] = 1;
  }
  return seen;
}

std::string shape_fault(const std::vector<MicroBatch>& batches, int64_t m,
                        const std::vector<ContextBlock>& blocks) {
  const std::vector<int64_t> above = ancestors(batches, m);
  const auto order = [](const ContextBlock& p) { return std::tuple(p.ancestor, p.column_begin); };
  for (size_t k = 0; k < blocks.size(); ++k) {
    const ContextBlock& p = blocks[k];
    if (!std::ranges::binary_search(above, p.ancestor)) return "not an ancestor";
    if (p.column_begin < 0 || p.column_begin >= p.column_end || p.row_begin < 0 || p.row_begin >= p.row_end ||
        p.column_end > batches[p.ancestor].num_tokens || p.row_end > batches[m].num_tokens) {
      return "an empty range or one outside";
    }
    if (k > 0) {
      const ContextBlock& last = blocks[k - 1];
      if (order(last) >= order(p)) return "not sorted";
      if (last.ancestor == p.ancestor && last.column_end == p.column_begin && last.row_begin == p.row_begin &&
          last.row_end == p.row_end) {
        return "two blocks that are one";
      }
    }
    for (const ContextBlock& q : blocks) {
      const bool disjoint = p.row_end <= q.row_begin || q.row_end <= p.row_begin;
      const bool inside = p.row_begin >= q.row_begin && p.row_end <= q.row_end;
      const bool around = p.row_begin <= q.row_begin && p.row_end >= q.row_end;
      if (!disjoint && !inside && !around) return "rows not laminar";
    }
  }
  return "";
}

/// Compares what the blocks and each layout's subtree_end show with the paths of the forest. Returns the
/// first difference, or "".
std::string context_fault(const Forest& forest, const std::vector<MicroBatch>& batches,
                          const AllPieces& blocks) {
  std::vector<Layout> layouts;
  for (const MicroBatch& b : batches) {
    layouts.push_back(make_layout(forest, b.runs, RootRuns::kContinueContext));
  }
  std::vector<std::vector<int>> seen(forest.tree_tokens(), std::vector<int>(forest.tree_tokens(), 0));
  for (size_t m = 0; m < batches.size(); ++m) {
    const auto index = static_cast<int64_t>(m);
    if (std::string fault = shape_fault(batches, index, blocks[m]); !fault.empty()) return fault;
    const Layout& own = layouts[m];
    for (int64_t i = 0; i < own.num_tokens(); ++i) {
      for (int64_t j = i; j < own.subtree_end[i]; ++j) ++seen[own.forest_token[j]][own.forest_token[i]];
    }
    for (const ContextBlock& block : blocks[m]) {
      const Layout& above = layouts[block.ancestor];
      for (int64_t i = block.column_begin; i < block.column_end; ++i) {
        if (above.position_ids[i] != block.position + i - block.column_begin) return "a wrong position";
        for (int64_t j = block.row_begin; j < block.row_end; ++j) {
          ++seen[own.forest_token[j]][above.forest_token[i]];
        }
      }
    }
  }
  const auto expected = visibility(forest);
  for (int64_t j = 0; j < forest.tree_tokens(); ++j) {
    for (int64_t i = 0; i < forest.tree_tokens(); ++i) {
      if (seen[j][i] != expected[j][i]) {
        return fmt::format("({}, {}): expected {}, received {}", j, i, expected[j][i], seen[j][i]);
      }
    }
  }
  return "";
}

void check_contexts(const Forest& forest, const std::vector<MicroBatch>& batches) {
  const AllPieces blocks = all_blocks(batches);
  ASSERT_EQ(context_fault(forest, batches, blocks), "");
  const ContextIndex index(batches);
  for (size_t m = 0; m < batches.size(); ++m) {
    ASSERT_EQ(context_tokens(index, static_cast<int64_t>(m)), context_tokens(blocks[m]));
    const Layout layout = make_layout(forest, batches[m].runs, RootRuns::kContinueContext);
    ASSERT_TRUE(std::ranges::equal(index.run_begin.row(static_cast<int64_t>(m)), layout.run_begin));
  }
}

TEST(Context, ReproducesTheVisibilityOfRandomForests) {
  for (uint64_t seed = 0; seed < seeds(2000); ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(test_seed(seed), 31);
    const Forest forest = build_forest(testing::random_rows(rng).view());
    std::vector<int64_t> cuts;
    const double density = rng.uniform();
    for (int64_t t = 0; t < forest.tree_tokens(); ++t) {
      if (rng.uniform() < density) cuts.push_back(t);
    }
    for (const Merge merge : {Merge::kNone, Merge::kLeaves, Merge::kAll}) {
      const int64_t budget = forest.tree_tokens();
      check_contexts(forest, partition_at(forest, cuts, budget, merge));
      check_contexts(forest, partition(forest, rng.between(1, budget), merge));
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Context, ReproducesTheVisibilityOfSyntheticTrees) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(test_seed(seed), 32);
    const Forest forest = testing::forest_of(synthesize({.num_trees = rng.between(1, 3),
                                                         .depth = 4,
                                                         .branching = rng.between(1, 3),
                                                         .node_length = rng.between(1, 5),
                                                         .end_inside = rng.uniform(),
                                                         .seed = test_seed(seed)}));
    for (const int64_t divisor : {3, 9, 27}) {
      check_contexts(forest, partition(forest, forest.tree_tokens() / divisor + 1, Merge::kAll));
      if (HasFatalFailure()) return;
    }
  }
}

// a: 0 1, below it b: 2 3 with c: 4 and e: 5, and d: 6. The last three are cut off and run together.
TEST(Context, OneBlockPerSetOfRows) {
  const Forest forest = build_forest(make_rows({{1, 1, 2, 2, 3}, {1, 1, 2, 2, 4}, {1, 1, 5}}).view());
  const std::vector<int64_t> cuts{1, 4, 5, 6};
  const auto batches = partition_at(forest, cuts, 5, Merge::kAll);
  ASSERT_EQ(batches.size(), 3u);
  const AllPieces blocks = all_blocks(batches);
  EXPECT_TRUE(blocks[0].empty());
  ASSERT_EQ(blocks[2].size(), 3u);
  const auto& [whole, all_rows, two_rows] = std::tie(blocks[2][0], blocks[2][1], blocks[2][2]);
  EXPECT_EQ(std::tuple(whole.ancestor, whole.column_begin, whole.column_end), std::tuple(0, 0, 1));
  EXPECT_EQ(std::tuple(whole.row_begin, whole.row_end), std::tuple(0, 3));
  EXPECT_EQ(std::tuple(all_rows.ancestor, all_rows.column_begin, all_rows.column_end), std::tuple(1, 0, 1));
  EXPECT_EQ(std::tuple(all_rows.row_begin, all_rows.row_end), std::tuple(0, 3));
  EXPECT_EQ(std::tuple(two_rows.ancestor, two_rows.column_begin, two_rows.column_end), std::tuple(1, 1, 3));
  EXPECT_EQ(std::tuple(two_rows.row_begin, two_rows.row_end), std::tuple(0, 2));
  EXPECT_EQ(context_tokens(blocks[2]), 4);
  EXPECT_EQ(ancestors(batches, 2), (std::vector<int64_t>{0, 1}));
  EXPECT_TRUE(ancestors(batches, 0).empty());
}

TEST(Context, IndexRefusesBrokenParents) {
  const Forest forest = build_forest(make_rows({{1, 2, 3}}).view());
  const auto good = partition(forest, 2, Merge::kAll);
  ASSERT_EQ(good.size(), 2u);
  auto bad = good;
  bad[0].parent = 1;
  EXPECT_THROW(ContextIndex{bad}, InternalError);
  bad = good;
  bad[1].context_runs.push_back(0);
  EXPECT_THROW(ContextIndex{bad}, InternalError);
}

// Negative controls: the check must see each single fault.
TEST(Context, CheckSeesFaults) {
  const Forest forest = build_forest(make_rows({{1, 1, 2, 2, 3}, {1, 1, 2, 2, 4}, {1, 1, 5}}).view());
  const std::vector<int64_t> cuts{1, 4, 5, 6};
  const auto batches = partition_at(forest, cuts, 5, Merge::kAll);
  const AllPieces good = all_blocks(batches);
  ASSERT_EQ(context_fault(forest, batches, good), "");
  using Blocks = std::vector<ContextBlock>;
  const std::vector<std::pair<const char*, std::function<void(Blocks&)>>> faults = {
      {"a block lost", [](Blocks& p) { p.pop_back(); }},
      {"a block twice", [](Blocks& p) { p.push_back(p.back()); }},
      {"a column lost", [](Blocks& p) { ++p[2].column_begin; }},
      {"a column of a sibling", [](Blocks& p) { ++p[1].column_end; }},
      {"a row lost", [](Blocks& p) { --p[0].row_end; }},
      {"a row too many", [](Blocks& p) { ++p[2].row_end; }},
      {"another ancestor", [](Blocks& p) { p[0].ancestor = 1; }},
      {"not an ancestor", [](Blocks& p) { p[0].ancestor = 2; }},
      {"order", [](Blocks& p) { std::swap(p[0], p[1]); }},
      {"a block in two",
       [](Blocks& p) {
         p.push_back(p[2]);
         p[2].column_end = p[3].column_begin = 2;
       }},
  };
  for (const auto& [name, fault] : faults) {
    AllPieces bad = good;
    fault(bad[2]);
    EXPECT_NE(context_fault(forest, batches, bad), "") << name;
  }
}

}  // namespace
}  // namespace espalier
