// SPDX-License-Identifier: Apache-2.0
#include "espalier/tree/forest.h"

#include <gtest/gtest.h>

#include <functional>
#include <numeric>

#include "espalier/base/check.h"
#include "espalier/tree/synth.h"
#include "tests/base/message_of.h"
#include "tests/test_seed.h"
#include "tests/tree/naive.h"

namespace espalier {
namespace {

using testing::difference_from_naive;
using testing::kIsSanitized;
using testing::make_rows;
using testing::message_of;
using testing::Rows;
using testing::seeds;
using testing::test_seed;

std::vector<int64_t> all_rows(const Rows& rows) {
  std::vector<int64_t> all(rows.tokens.num_rows());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

void expect_same(const Forest& a, const Forest& b) {
  EXPECT_EQ(a.tokens, b.tokens);
  EXPECT_EQ(a.node_begin, b.node_begin);
  EXPECT_EQ(a.parent, b.parent);
  EXPECT_EQ(a.subtree_last, b.subtree_last);
  EXPECT_EQ(a.position, b.position);
  EXPECT_EQ(a.multiplicity, b.multiplicity);
  EXPECT_EQ(a.end_node, b.end_node);
}

TEST(Forest, HandMadeExample) {
  const Rows rows = make_rows({{1, 2, 3, 4}, {1, 2, 5}, {9}, {1, 2}, {1, 2, 5}, {1, 2, 3, 4, 6}});
  const Forest forest = build_forest(rows.view());
  EXPECT_EQ(forest.tokens, (std::vector<int32_t>{1, 2, 3, 4, 6, 5, 9}));
  EXPECT_EQ(forest.node_begin, (std::vector<int64_t>{0, 2, 4, 5, 6, 7}));
  EXPECT_EQ(forest.parent, (std::vector<int64_t>{-1, 0, 1, 0, -1}));
  EXPECT_EQ(forest.subtree_last, (std::vector<int64_t>{4, 3, 3, 4, 5}));
  EXPECT_EQ(forest.position, (std::vector<int64_t>{0, 2, 4, 2, 0}));
  EXPECT_EQ(forest.multiplicity, (std::vector<int64_t>{5, 2, 1, 2, 1}));
  EXPECT_EQ(forest.end_node, (std::vector<int64_t>{1, 3, 4, 0, 3, 2}));
  EXPECT_EQ(forest.flat_tokens(), 18);
  EXPECT_EQ(root_path(forest, 2), (std::vector<int64_t>{0, 1, 2}));
}

TEST(Forest, RandomRowsMatchThePrefixSet) {
  for (uint64_t seed = 0; seed < seeds(3000); ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(test_seed(seed));
    const Rows rows = testing::random_rows(rng);
    const std::vector<int64_t> subset = testing::random_subset(rng, rows);
    const Forest forest = build_forest(rows.view(), subset);
    ASSERT_EQ(difference_from_naive(rows, subset, forest), "");
    expect_same(forest, build_forest(rows.view(), subset));
  }
}

std::vector<int32_t> tokens_of(const Forest& forest, int64_t trajectory) {
  std::vector<int32_t> tokens;
  for (const int64_t n : root_path(forest, forest.end_node[trajectory])) {
    tokens.insert(tokens.end(), forest.tokens.begin() + forest.node_begin[n],
                  forest.tokens.begin() + forest.node_begin[n + 1]);
  }
  return tokens;
}

TEST(Forest, TheChildWithMostLeavesMayBeFirst) {
  bool has_moved = false;
  for (uint64_t seed = 0; seed < seeds(1000); ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(test_seed(seed), 5);
    const Rows rows = testing::random_rows(rng);
    const Forest as_reached = build_forest(rows.view()),
                 forest = build_forest(rows.view(), {}, ChildOrder::kMostLeavesFirst);
    ASSERT_EQ(forest.num_nodes(), as_reached.num_nodes());
    std::vector<int64_t> leaves(forest.num_nodes(), 0),
        reached(forest.num_nodes(), forest.num_trajectories());
    for (int64_t r = 0; r < forest.num_trajectories(); ++r) {
      ASSERT_EQ(tokens_of(forest, r), tokens_of(as_reached, r));
      for (const int64_t n : root_path(forest, forest.end_node[r])) reached[n] = std::min(reached[n], r);
    }
    for (int64_t n = forest.num_nodes() - 1; n >= 0; --n) {
      leaves[n] += forest.subtree_last[n] == n + 1;
      if (forest.parent[n] >= 0) leaves[forest.parent[n]] += leaves[n];
    }
    for (int64_t n = 0; n < forest.num_nodes(); ++n) {
      if (forest.subtree_last[n] == n + 1) continue;
      for (int64_t before = n + 1, child = forest.subtree_last[before]; child < forest.subtree_last[n];
           before = child, child = forest.subtree_last[child]) {
        const int64_t first = n + 1;
        ASSERT_TRUE(leaves[first] > leaves[child] ||
                    (leaves[first] == leaves[child] && reached[first] < reached[child]));
        ASSERT_TRUE(before == first || reached[before] < reached[child]);
        has_moved |= reached[child] < reached[first];
      }
    }
  }
  EXPECT_TRUE(has_moved);
}

TEST(Forest, SyntheticForestsMatchThePrefixSet) {
  for (uint64_t seed = 0; seed < seeds(200); ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(test_seed(seed), 1);
    SynthOptions options{.num_trees = rng.between(1, 3), .depth = rng.between(1, 4), .seed = test_seed(seed)};
    options.branching = rng.between(1, options.depth > 3 ? 2 : 3);
    options.node_length = rng.between(1, 5);
    options.vocab_size = rng.between(3, 9);
    options.end_inside = rng.uniform();
    options.duplicate = rng.uniform();
    Rows rows{synthesize(options), {}, {}};
    ASSERT_EQ(difference_from_naive(rows, all_rows(rows), build_forest(rows.view())), "");
  }
}

TEST(Forest, HandMadeShapesMatchThePrefixSet) {
  std::vector<int32_t> long_row(300);
  std::iota(long_row.begin(), long_row.end(), 0);
  std::vector<int32_t> late = long_row, later = long_row;  // differ past the first compared block
  late[200] = -1;
  later[299] = -1;
  const std::vector<std::vector<std::vector<int32_t>>> shapes = {
      {{7}},
      {{7}, {7}, {7}},
      {{1}, {2}, {3}},  // single tokens
      {{1, 2, 3, 4}},
      {{1}, {1, 2}, {1, 2, 3}},
      {{1, 2, 3}, {1, 2}, {1}},               // chains
      {{0, 1}, {0, 2}, {0, 3}, {0, 4}, {0}},  // a star
      {long_row, late, later, {0, 1}},
      {{-5, 3}, {-5, 4}, {2147483647}},
  };
  for (size_t k = 0; k < shapes.size(); ++k) {
    SCOPED_TRACE(k);
    const Rows rows = make_rows(shapes[k]);
    EXPECT_EQ(difference_from_naive(rows, all_rows(rows), build_forest(rows.view())), "");
  }
}

TEST(Forest, KeysKeepEqualTokensApart) {
  Rows rows = make_rows({{1, 2, 3}, {1, 2, 3}});
  EXPECT_EQ(build_forest(rows.view()).num_nodes(), 1);
  rows.merge_keys = {0, 0, 0, 0, uint64_t{1} << 40, 0};
  EXPECT_EQ(build_forest(rows.view()).tree_tokens(), 5);
  rows.merge_keys.clear();
  rows.tree_keys = {4, -4};
  EXPECT_EQ(build_forest(rows.view()).parent, (std::vector<int64_t>{-1, -1}));
}

TEST(Forest, DeepChain) {
  constexpr int64_t kDepth = kIsSanitized ? 2000 : 10'000;
  Rows rows;
  rows.tokens.values.assign(kDepth * (kDepth + 1) / 2, 3);
  for (int64_t r = 0; r < kDepth; ++r) rows.tokens.offsets.push_back(rows.tokens.offsets.back() + r + 1);
  const Forest forest = build_forest(rows.view());
  ASSERT_EQ(forest.num_nodes(), kDepth);
  EXPECT_EQ(forest.tree_tokens(), kDepth);
  for (int64_t n = 0; n < kDepth; ++n) {
    ASSERT_EQ(forest.parent[n], n - 1);
    ASSERT_EQ(forest.multiplicity[n], kDepth - n);
    ASSERT_EQ(forest.subtree_last[n], kDepth);
    ASSERT_EQ(forest.end_node[n], n);
  }
}

TEST(Forest, WideStar) {
  constexpr int64_t kWidth = 10'000;
  Rows rows;
  for (int32_t r = 0; r < kWidth; ++r) rows.tokens.push_row(std::vector<int32_t>{5, 5, r});
  const Forest forest = build_forest(rows.view());
  ASSERT_EQ(forest.num_nodes(), kWidth + 1);
  EXPECT_EQ(forest.multiplicity[0], kWidth);
  for (int64_t n = 1; n <= kWidth; ++n) {
    ASSERT_EQ(forest.parent[n], 0);
    ASSERT_EQ(forest.tokens[n + 1], n - 1);
  }
}

TEST(Forest, RowsInAnySubsetAndOrder) {
  const Rows rows = make_rows({{1, 2}, {}, {1, 3}, {4}});
  const std::vector<int64_t> subset{3, 2, 0, 3};  // the empty row is not asked for
  const Forest forest = build_forest(rows.view(), subset);
  EXPECT_EQ(forest.tokens, (std::vector<int32_t>{4, 1, 3, 2}));
  EXPECT_EQ(forest.end_node, (std::vector<int64_t>{0, 2, 3, 0}));
  EXPECT_EQ(build_forest(make_rows({}).view()).num_nodes(), 0);
}

TEST(Forest, RefusesBadInput) {
  const Rows rows = make_rows({{1, 2}, {}, {3}});
  EXPECT_EQ(message_of<InputError>([&] { build_forest(rows.view()); }),
            "row 1: expected at least one token, received an empty sequence");
  const std::vector<int64_t> outside{0, 3};
  EXPECT_EQ(message_of<InputError>([&] { build_forest(rows.view(), outside); }),
            "row 3: expected a row in [0, 3)");
  Rows keys = make_rows({{1, 2}});
  keys.merge_keys = {1};
  EXPECT_NE(message_of<InputError>([&] { build_forest(keys.view()); }).find("expected 2 merge keys"),
            std::string::npos);
  keys.merge_keys.clear();
  keys.tree_keys = {1, 2};
  EXPECT_NE(message_of<InputError>([&] { build_forest(keys.view()); }).find("expected 1 tree keys"),
            std::string::npos);
  Rows offsets = make_rows({{1}, {2}});
  offsets.tokens.offsets = {0, 3, 2};
  EXPECT_NE(message_of<InputError>([&] { build_forest(offsets.view()); }).find("expected ascending offsets"),
            std::string::npos);
  offsets.tokens.offsets = {0, 1};
  EXPECT_NE(message_of<InputError>([&] { build_forest(offsets.view()); }).find("expected 1 tokens"),
            std::string::npos);
}

// Negative controls: the comparison must see each single fault.
TEST(Forest, ComparisonSeesFaults) {
  const Rows rows = make_rows({{1, 2, 3, 4}, {1, 2, 5}, {9}, {1, 2, 6}});
  const std::vector<int64_t> all = all_rows(rows);
  const Forest good = build_forest(rows.view());
  ASSERT_EQ(difference_from_naive(rows, all, good), "");
  const std::vector<std::pair<const char*, std::function<void(Forest&)>>> faults = {
      {"multiplicity", [](Forest& f) { ++f.multiplicity[1]; }},
      {"a wrong end", [](Forest& f) { std::swap(f.end_node[1], f.end_node[3]); }},
      {"subtree one short", [](Forest& f) { --f.subtree_last[0]; }},
      {"a wrong token", [](Forest& f) { f.tokens[3] = 8; }},
      {"siblings out of order",
       [](Forest& f) {
         std::swap(f.tokens[4], f.tokens[5]);
         std::swap(f.end_node[1], f.end_node[3]);
       }},
      {"a chain not collapsed",
       [](Forest& f) {
         f.node_begin.insert(f.node_begin.begin() + 1, 1);
         f.parent = {-1, 0, 1, 1, 1, -1};
         f.subtree_last = {5, 5, 3, 4, 5, 6};
         f.position = {0, 1, 2, 2, 2, 0};
         f.multiplicity = {3, 3, 1, 1, 1, 1};
         f.end_node = {2, 3, 5, 4};
       }},
      {"a token not shared",
       [](Forest& f) {
         f = build_forest(
             Rows{make_rows({{1, 2, 3, 4}, {1, 2, 5}, {9}, {1, 2, 6}}).tokens, {}, {0, 0, 0, 1}}.view());
       }},
  };
  for (const auto& [name, fault] : faults) {
    Forest bad = good;
    fault(bad);
    EXPECT_NE(difference_from_naive(rows, all, bad), "") << name;
  }
}

}  // namespace
}  // namespace espalier
