// SPDX-License-Identifier: Apache-2.0
#include "espalier/tree/synth.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "espalier/base/check.h"
#include "espalier/base/rng.h"
#include "espalier/tree/forest.h"
#include "tests/base/message_of.h"
#include "tests/test_seed.h"
#include "tests/tree/naive.h"

namespace espalier {
namespace {

using testing::kIsSanitized;
using testing::seeds;

ForestStatistics statistics_of(const SynthOptions& options) {
  return forest_statistics(testing::forest_of(synthesize(options)));
}

std::string refusal_of(const SynthOptions& options) {
  return testing::message_of<InputError>([&] { synthesize(options); });
}

TEST(Synth, TheIntendedTreeIsTheBuiltTree) {
  const ForestStatistics statistics = statistics_of({.num_trees = 4,
                                                     .depth = 4,
                                                     .branching = 3,
                                                     .node_length = 5,
                                                     .fixed_node_length = true,
                                                     .vocab_size = 4});
  EXPECT_EQ(statistics.num_trees, 4);
  EXPECT_EQ(statistics.num_nodes, 4 * (1 + 3 + 9 + 27));
  EXPECT_EQ(statistics.num_trajectories, 4 * 27);
  EXPECT_EQ(statistics.tree_tokens, 4 * 40 * 5);
  EXPECT_EQ(statistics.flat_tokens, 4 * 27 * 4 * 5);
  EXPECT_EQ(statistics.max_depth_nodes, 4);
  EXPECT_EQ(statistics.nodes_by_branching, (std::map<int64_t, int64_t>{{0, 108}, {3, 52}}));
}

TEST(Synth, LengthsAndTokensStayInTheirRanges) {
  const SynthOptions options{
      .num_trees = 5, .depth = 4, .branching = 4, .node_length = 9, .vocab_size = 20, .first_token = 7};
  const Csr<int32_t> rows = synthesize(options);
  const auto [lowest, highest] = std::minmax_element(rows.values.begin(), rows.values.end());
  EXPECT_EQ(*lowest, 7);
  EXPECT_EQ(*highest, 19);
  const Forest forest = testing::forest_of(rows);
  std::set<int64_t> lengths;
  for (int64_t n = 0; n < forest.num_nodes(); ++n) lengths.insert(forest.node_size(n));
  EXPECT_EQ(*lengths.begin(), 5);
  EXPECT_EQ(*lengths.rbegin(), 13);
  EXPECT_NEAR(static_cast<double>(forest.tree_tokens()) / static_cast<double>(forest.num_nodes()), 9, 0.5);
}

TEST(Synth, TrajectoriesStandInPreorderOfTheirEnds) {
  const Forest forest = testing::forest_of(synthesize({.depth = 5, .end_inside = 0.5, .duplicate = 0.3}));
  EXPECT_TRUE(std::is_sorted(forest.end_node.begin(), forest.end_node.end()));
}

TEST(Synth, EndsInsideAndDuplicates) {
  const SynthOptions plain{.depth = 7, .branching = 3, .node_length = 2};  // 1093 nodes, 729 leaves
  EXPECT_EQ(statistics_of(plain).num_trajectories, 729);
  SynthOptions inside = plain;
  inside.end_inside = 1;
  EXPECT_EQ(statistics_of(inside).num_trajectories, 1093);
  inside.duplicate = 1;
  EXPECT_EQ(statistics_of(inside).num_trajectories, 2 * 1093);
  inside.end_inside = 0.25;
  inside.duplicate = 0.5;
  EXPECT_NEAR(static_cast<double>(statistics_of(inside).num_trajectories), (729 + 0.25 * 364) * 1.5, 80);
}

TEST(Synth, ChainsAreOneNode) {
  EXPECT_EQ(statistics_of({.depth = 50, .branching = 1}).num_nodes, 1);
  EXPECT_EQ(statistics_of({.depth = 50, .branching = 1, .end_inside = 1}).num_nodes, 50);
}

TEST(Synth, SameSeedSameRows) {
  const SynthOptions options{
      .num_trees = 3, .end_inside = 0.5, .duplicate = 0.2, .seed = testing::test_seed(11)};
  const Csr<int32_t> a = synthesize(options), b = synthesize(options);
  EXPECT_EQ(a.offsets, b.offsets);
  EXPECT_EQ(a.values, b.values);
  SynthOptions other = options;
  other.seed = testing::test_seed(12);
  EXPECT_NE(a.values, synthesize(other).values);
}

TEST(Synth, RatiosAreMet) {
  for (const double target : {1.05, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0}) {
    for (const bool fixed : {false, true}) {
      SCOPED_TRACE(target);
      const SynthOptions options{.num_trees = 2,
                                 .depth = 2,
                                 .branching = 96,
                                 .node_length = 100,
                                 .fixed_node_length = fixed,
                                 .vocab_size = 500,
                                 .target_cached_token_ratio = target};
      const ForestStatistics statistics = statistics_of(options);
      EXPECT_NEAR(statistics.cached_token_ratio / target, 1, 0.02);
      EXPECT_NEAR(static_cast<double>(statistics.tree_tokens) / static_cast<double>(statistics.num_nodes),
                  100, 8);
    }
  }
}

TEST(Synth, RatioIsMetOnManyShapes) {
  int met = 0;
  for (uint64_t seed = 0; seed < seeds(300); ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(testing::test_seed(seed), 3);
    SynthOptions options{
        .num_trees = rng.between(1, 4), .depth = rng.between(2, 4), .branching = rng.between(2, 6)};
    options.node_length = rng.between(20, 60);
    options.end_inside = rng.uniform() * 0.5;
    options.duplicate = rng.uniform() * 0.2;
    options.target_cached_token_ratio = 1 / (1 - rng.uniform() * 0.8);
    options.seed = testing::test_seed(seed);
    try {
      const double ratio = statistics_of(options).cached_token_ratio;
      ASSERT_NEAR(ratio / options.target_cached_token_ratio, 1, 0.02);
      ++met;
    } catch (const InputError& error) {
      ASSERT_NE(std::string(error.what()).find("target_cached_token_ratio: expected a value that trees"),
                std::string::npos);
    }
  }
  EXPECT_GT(met, kIsSanitized ? 0 : 100);
}

TEST(Synth, UnreachableTargetsNameTheRange) {
  SynthOptions options{.depth = 2, .branching = 4, .node_length = 100, .fixed_node_length = true};
  options.target_cached_token_ratio = 5;  // 496 of 500 tokens in the root: (4 * 496 + 4) / 500 = 3.976
  EXPECT_EQ(
      refusal_of(options),
      "synth: target_cached_token_ratio: expected a value that trees of depth 2, branching 4 and mean node "
      "length 100 reach, in [1.006, 3.976] (nearest 3.976), received 5");
  options.target_cached_token_ratio = 3.9;
  EXPECT_EQ(refusal_of(options), "");
  options.branching = 1;
  EXPECT_NE(refusal_of(options).find("in [1, 1]"), std::string::npos);
}

TEST(Synth, RefusesBadOptions) {
  EXPECT_NE(refusal_of({.branching = 10, .vocab_size = 9}).find("branching: expected at most 9"),
            std::string::npos);
  EXPECT_NE(
      refusal_of({.num_trees = 10, .vocab_size = 12, .first_token = 5}).find("num_trees: expected at most 7"),
      std::string::npos);
  EXPECT_NE(refusal_of({.depth = 0}).find("depth: expected at least 1, received 0"), std::string::npos);
  EXPECT_NE(refusal_of({.node_length = 0}).find("node_length"), std::string::npos);
  EXPECT_NE(refusal_of({.end_inside = 1.5}).find("end_inside"), std::string::npos);
  EXPECT_NE(refusal_of({.duplicate = -0.5}).find("duplicate"), std::string::npos);
  EXPECT_NE(refusal_of({.duplicate = std::nan("")}).find("duplicate"), std::string::npos);
  EXPECT_NE(refusal_of({.vocab_size = 3, .first_token = 3}).find("first_token"), std::string::npos);
  EXPECT_NE(refusal_of({.target_cached_token_ratio = 0.5}).find("target_cached_token_ratio"),
            std::string::npos);
  EXPECT_NE(refusal_of({.depth = 60, .branching = 200}).find("nodes"), std::string::npos);
}

}  // namespace
}  // namespace espalier
