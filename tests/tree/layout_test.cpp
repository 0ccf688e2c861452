// SPDX-License-Identifier: Apache-2.0
#include "espalier/tree/layout.h"

#include <gtest/gtest.h>

#include <functional>
#include <numeric>

#include "espalier/base/check.h"
#include "tests/tree/naive.h"

namespace espalier {
namespace {

using testing::make_rows;
using testing::Rows;

/// 1 2 | 3 4 ; 1 2 | 5 ; 9
Rows example() {
  return make_rows({{1, 2, 3, 4}, {1, 2, 5}, {9}});
}

TEST(Layout, HandMadeExample) {
  const Forest forest = build_forest(example().view());
  const Layout layout = make_layout(forest, whole_forest(forest));
  EXPECT_EQ(layout.input_ids, (std::vector<int32_t>{1, 2, 3, 4, 5, 9}));
  EXPECT_EQ(layout.forest_token, (std::vector<int64_t>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(layout.position_ids, (std::vector<int32_t>{0, 1, 2, 3, 2, 0}));
  EXPECT_EQ(layout.subtree_end, (std::vector<int32_t>{5, 5, 4, 4, 5, 6}));
  EXPECT_EQ(layout.prev, (std::vector<int32_t>{-1, 0, 1, 2, 1, -1}));
  EXPECT_EQ(layout.run_begin, (std::vector<int64_t>{0, 2, 4, 5, 6}));
  EXPECT_EQ(path_tokens(layout, 2), (std::vector<int64_t>{0, 1, 4}));
  EXPECT_EQ(visible_pairs(layout), 1 + 2 + 3 + 4 + 3 + 1);
}

TEST(Layout, RepeatedPrefixesAndRunsOverSeveralNodes) {
  const Rows rows = example();
  const Forest forest = build_forest(rows.view());
  // The second path first; then the first path as one run over two nodes; then a node cut in two.
  const std::vector<espalier::Run> runs = {{0, 2, -1}, {4, 5, 0}, {0, 4, -1}, {5, 6, -1},
                                           {0, 1, -1}, {1, 3, 4}, {3, 4, 5}};
  const Layout layout = make_layout(forest, runs);
  const std::vector<int64_t> subset{1, 0, 2, 0}, end_run{1, 2, 3, 6};
  EXPECT_EQ(testing::layout_difference(rows, subset, layout, end_run), "");
}

TEST(Layout, PathsAndMultiplicityOfTheTrajectories) {
  const Forest forest = build_forest(make_rows({{1, 2, 3, 4}, {1, 2, 5}, {9}, {1, 2}}).view());
  const Layout layout = make_layout(forest, whole_forest(forest));
  const Csr<int64_t> paths = all_path_tokens(layout, forest.end_node);
  EXPECT_EQ(paths.offsets, (std::vector<int64_t>{0, 4, 7, 8, 10}));
  EXPECT_EQ(paths.values, (std::vector<int64_t>{0, 1, 2, 3, 0, 1, 4, 5, 0, 1}));
  EXPECT_EQ(token_multiplicity(layout, forest.end_node), (std::vector<int64_t>{3, 3, 1, 1, 1, 1}));
  // Of two of the four trajectories, one of them twice.
  EXPECT_EQ(token_multiplicity(layout, std::vector<int64_t>{2, 2, 0}),
            (std::vector<int64_t>{3, 3, 0, 0, 2, 0}));
}

TEST(Layout, NoRuns) {
  const Layout layout = make_layout(build_forest(make_rows({}).view()), {});
  EXPECT_EQ(layout.num_tokens(), 0);
  EXPECT_EQ(layout.num_runs(), 0);
  EXPECT_EQ(visible_pairs(layout), 0);
}

TEST(Layout, RefusesRunsThatDoNotJoin) {
  const Forest forest = build_forest(make_rows({{1, 2, 3}, {1, 2, 4, 5}, {1, 2, 4, 6}, {9}}).view());
  // nodes: [1 2] [3] [4] [5] [6] [9]
  const std::vector<std::vector<espalier::Run>> bad = {
      {{0, 0, -1}},                                   // empty
      {{0, 8, -1}},                                   // past the end
      {{0, 4, -1}},                                   // over siblings
      {{2, 3, -1}},                                   // a root that is none
      {{1, 2, -1}},                                   // the same inside a node
      {{0, 1, -1}, {2, 3, 0}},                        // a hole
      {{0, 2, -1}, {2, 3, 1}},                        // its own parent
      {{0, 2, -1}, {6, 7, 0}},                        // a root below a run
      {{0, 2, -1}, {4, 5, 0}},                        // a generation left out
      {{0, 2, -1}, {3, 4, 0}, {2, 3, 0}, {4, 5, 1}},  // not in preorder
      {{0, 2, -1}, {6, 7, -1}, {2, 3, 0}},            // back to a tree that is closed
  };
  for (size_t k = 0; k < bad.size(); ++k) EXPECT_THROW(make_layout(forest, bad[k]), InternalError) << k;
  EXPECT_NO_THROW(
      make_layout(forest, std::vector<espalier::Run>{{0, 2, -1}, {3, 4, 0}, {4, 5, 1}, {2, 3, 0}}));
}

TEST(Layout, DepthOfAHundredThousandNodes) {
  constexpr int64_t kDepth = 100'000;
  Forest forest;
  forest.tokens.assign(kDepth, 1);
  forest.node_begin.resize(kDepth + 1);
  std::iota(forest.node_begin.begin(), forest.node_begin.end(), 0);
  forest.position = forest.end_node =
      std::vector<int64_t>(forest.node_begin.begin(), forest.node_begin.end() - 1);
  for (int64_t n = 0; n < kDepth; ++n) {
    forest.parent.push_back(n - 1);
    forest.multiplicity.push_back(kDepth - n);
    forest.subtree_last.push_back(kDepth);
  }
  const Layout layout = make_layout(forest, whole_forest(forest));
  EXPECT_EQ(layout.subtree_end.front(), kDepth);
  EXPECT_EQ(visible_pairs(layout), kDepth * (kDepth + 1) / 2);
  EXPECT_EQ(path_tokens(layout, kDepth - 1).size(), static_cast<size_t>(kDepth));
  EXPECT_EQ(root_path(forest, kDepth - 1).size(), static_cast<size_t>(kDepth));
}

// Negative controls: the comparison must see each single fault.
TEST(Layout, ComparisonSeesFaults) {
  const Rows rows = example();
  const Forest forest = build_forest(rows.view());
  const Layout good = make_layout(forest, whole_forest(forest));
  const std::vector<int64_t> subset{0, 1, 2};
  ASSERT_EQ(testing::layout_difference(rows, subset, good, forest.end_node), "");
  const std::vector<std::pair<const char*, std::function<void(Layout&)>>> faults = {
      {"a sibling leaks", [](Layout& l) { ++l.subtree_end[2]; }},
      {"the mask is one short", [](Layout& l) { --l.subtree_end[0]; }},
      {"a wrong position", [](Layout& l) { ++l.position_ids[1]; }},
      {"prev inside the run before", [](Layout& l) { l.prev[4] = 3; }},
      {"a wrong token", [](Layout& l) { l.input_ids[5] = 8; }},
  };
  for (const auto& [name, fault] : faults) {
    Layout bad = good;
    fault(bad);
    EXPECT_NE(testing::layout_difference(rows, subset, bad, forest.end_node), "") << name;
  }
}

}  // namespace
}  // namespace espalier
