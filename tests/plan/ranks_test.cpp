// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "espalier/base/check.h"
#include "espalier/tree/synth.h"
#include "tests/base/message_of.h"
#include "tests/plan/small_decoder.h"
#include "tests/test_seed.h"
#include "tests/tree/naive.h"

namespace espalier {
namespace {

using testing::forest_of;
using testing::kIsSanitized;
using testing::make_rows;
using testing::message_of;
using testing::seeds;
using testing::test_seed;

TimeModel small_model() {
  return testing::small_decoder_costs().time;
}

TimeModel model_with_windows() {
  const AttentionSpec full{.num_attention_heads = 4, .num_key_value_heads = 2, .head_dim = 64};
  AttentionSpec sliding = full;
  sliding.sliding_window = 3;
  const DenseMlpSpec mlp{.intermediate_size = 704};
  return assumed_time_model(
      model_cost({.hidden_size = 256, .vocab_size = 1000, .layers = {{full, mlp}, {sliding, mlp}}}));
}

/// The seconds of a forest, token by token.
double naive_seconds(const Forest& forest, const TimeModel& model) {
  double seconds = 0;
  for (int64_t n = 0; n < forest.num_nodes(); ++n) {
    for (int64_t i = 0; i < forest.node_size(n); ++i) {
      const int64_t position = forest.position[n] + i;
      seconds += path_seconds(model, position + 1) - path_seconds(model, position);
    }
  }
  return seconds;
}

/// The tree of each trajectory.
std::vector<int64_t> trees_of(const Forest& forest) {
  std::vector<int64_t> trees;
  for (int64_t t = 0; t < forest.num_trajectories(); ++t) {
    trees.push_back(root_path(forest, forest.end_node[t]).front());
  }
  return trees;
}

/// The first difference of the plan from what its trajectories say, or "".
std::string fault(const TokenSequences& rows, const std::vector<int64_t>& subset, const Forest& forest,
                  const TimeModel& model, const RankPlan& plan) {
  std::vector<int64_t> times(forest.num_trajectories());
  std::map<int64_t, std::set<size_t>> ranks_of_tree;
  const std::vector<int64_t> trees = trees_of(forest);
  int64_t tokens = 0;
  for (size_t r = 0; r < plan.ranks.size(); ++r) {
    const RankShare& share = plan.ranks[r];
    if (!std::ranges::is_sorted(share.trajectories)) return "trajectories are not ascending";
    std::vector<int64_t> of_rank;
    for (const int64_t t : share.trajectories) {
      ++times[t];
      ranks_of_tree[trees[t]].insert(r);
      of_rank.push_back(subset[t]);
    }
    Forest own;
    if (!of_rank.empty()) own = build_forest(rows, of_rank);
    if (own.tree_tokens() != share.tree_tokens) return fmt::format("tokens of rank {}", r);
    const double seconds = naive_seconds(own, model);
    if (std::abs(seconds - share.seconds) > 1e-9 * (seconds + 1e-9)) {
      return fmt::format("seconds of rank {}: {} instead of {}", r, share.seconds, seconds);
    }
    tokens += share.tree_tokens;
  }
  if (std::ranges::any_of(times, [](int64_t count) { return count != 1; })) return "a trajectory is not once";
  if (tokens - forest.tree_tokens() != plan.repeated_tokens) return "repeated tokens";
  const auto split =
      std::ranges::count_if(ranks_of_tree, [](const auto& at) { return at.second.size() > 1; });
  if (split != plan.split_trees) return fmt::format("{} split trees instead of {}", plan.split_trees, split);
  if (plan.seconds() < plan.least_seconds * (1 - 1e-9)) return "faster than can be";
  return "";
}

TEST(Ranks, RandomForests) {
  for (uint64_t seed = 0; seed < seeds(1000); ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(test_seed(seed), 21);
    const testing::Rows rows = testing::random_rows(rng);
    const std::vector<int64_t> subset = testing::random_subset(rng, rows);
    const Forest forest = build_forest(rows.view(), subset);
    const TimeModel model = seed % 2 == 0 ? small_model() : model_with_windows();
    const int64_t ranks = rng.between(1, 5);
    const RankPlan plan = distribute(forest, ranks, model);
    ASSERT_EQ(static_cast<int64_t>(plan.ranks.size()), ranks);
    ASSERT_EQ(fault(rows.view(), subset, forest, model, plan), "");
    if (ranks == 1) {
      ASSERT_EQ(plan.repeated_tokens, 0);
      ASSERT_NEAR(plan.seconds(), plan.least_seconds, 1e-9 * plan.seconds());
    }
  }
}

TEST(Ranks, SyntheticForests) {
  for (uint64_t seed = 0; seed < seeds(20); ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(test_seed(seed), 22);
    const Csr<int32_t> rows = synthesize({.num_trees = rng.between(1, 12),
                                          .depth = rng.between(1, 5),
                                          .branching = rng.between(1, 4),
                                          .node_length = rng.between(1, 40),
                                          .end_inside = rng.uniform(),
                                          .seed = test_seed(seed)});
    const TokenSequences view{.offsets = rows.offsets, .tokens = rows.values};
    std::vector<int64_t> all(rows.num_rows());
    std::iota(all.begin(), all.end(), 0);
    const Forest forest = build_forest(view);
    const int64_t ranks = rng.between(2, 17);
    const RankPlan plan = distribute(forest, ranks, small_model());
    ASSERT_EQ(fault(view, all, forest, small_model(), plan), "");
    const RankPlan again = distribute(forest, ranks, small_model());
    for (int64_t r = 0; r < ranks; ++r) ASSERT_EQ(plan.ranks[r].trajectories, again.ranks[r].trajectories);
  }
}

/// The seconds of the slowest rank in the best of all divisions of the trajectories.
double best_seconds(const TokenSequences& rows, int64_t ranks, const TimeModel& model) {
  const int64_t n = rows.num_sequences();
  std::vector<int64_t> rank(n, 0);
  double best = naive_seconds(build_forest(rows), model);
  const auto visit = [&](const auto& self, int64_t t) -> void {
    if (t < n) {
      for (rank[t] = 0; rank[t] < ranks; ++rank[t]) self(self, t + 1);
      return;
    }
    double slowest = 0;
    for (int64_t r = 0; r < ranks; ++r) {
      std::vector<int64_t> own;
      for (int64_t i = 0; i < n; ++i) {
        if (rank[i] == r) own.push_back(i);
      }
      if (!own.empty()) slowest = std::max(slowest, naive_seconds(build_forest(rows, own), model));
    }
    best = std::min(best, slowest);
  };
  visit(visit, 0);
  return best;
}

TEST(Ranks, IsCloseToTheBestOfAllDivisions) {
  for (uint64_t seed = 0; seed < seeds(60); ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(test_seed(seed), 23);
    std::vector<std::vector<int32_t>> rows;
    for (int64_t r = 0; r < 6; ++r) {
      std::vector<int32_t>& row = rows.emplace_back(rng.between(1, 12));
      for (int32_t& token : row) token = static_cast<int32_t>(rng.below(2));
    }
    const testing::Rows given = make_rows(rows);
    const RankPlan plan = distribute(build_forest(given.view()), 2, small_model());
    EXPECT_LE(plan.seconds(), 4.0 / 3 * best_seconds(given.view(), 2, small_model()));
  }
}

TEST(Ranks, WholeTreesStayWholeWhereThatIsEven) {
  std::vector<std::vector<int32_t>> rows;
  for (int32_t tree = 0; tree < 8; ++tree) {
    for (int32_t leaf = 0; leaf < 3; ++leaf) rows.push_back({tree, 7, 7, 7, leaf, 1});
  }
  const RankPlan plan = distribute(build_forest(make_rows(rows).view()), 4, small_model());
  EXPECT_EQ(plan.split_trees, 0);
  EXPECT_EQ(plan.repeated_tokens, 0);
  EXPECT_NEAR(plan.imbalance(), 0, 1e-12);
}

TEST(Ranks, ATreeHeavierThanTheMeanIsSplitByItsBranches) {
  // A prompt of 10 tokens, and 16 answers of 50.
  std::vector<std::vector<int32_t>> rows;
  for (int32_t leaf = 0; leaf < 16; ++leaf) {
    std::vector<int32_t>& row = rows.emplace_back(10, 1);
    row.resize(60, 100 + leaf);
  }
  const Forest forest = build_forest(make_rows(rows).view());
  const RankPlan plan = distribute(forest, 4, small_model());
  EXPECT_EQ(plan.split_trees, 1);
  EXPECT_EQ(plan.repeated_tokens, 3 * 10);
  for (const RankShare& share : plan.ranks) EXPECT_EQ(share.trajectories.size(), 4u);
  EXPECT_NEAR(plan.imbalance(), 0, 1e-12);
}

TEST(Ranks, ManyTreesAreEvenOnManyRanks) {
  const Csr<int32_t> rows =
      synthesize({.num_trees = 250, .depth = 3, .branching = 2, .node_length = 30, .seed = 1});
  const Forest forest = forest_of(rows);
  for (const int64_t ranks : {2, 8, 64}) {
    if (kIsSanitized && ranks != 8) continue;
    const RankPlan plan = distribute(forest, ranks, small_model());
    EXPECT_LE(plan.imbalance(), 0.05) << ranks;
    EXPECT_LE(plan.seconds(), distribute_trajectories(forest, ranks, small_model()).seconds()) << ranks;
  }
}

TEST(Ranks, MoreRanksThanTrajectoriesLeaveSomeWithoutWork) {
  const RankPlan plan = distribute(build_forest(make_rows({{1, 2, 3}, {4, 5, 6}}).view()), 5, small_model());
  EXPECT_EQ(
      std::ranges::count_if(plan.ranks, [](const RankShare& share) { return share.trajectories.empty(); }),
      3);
  const RankPlan none = distribute(build_forest(make_rows({}).view()), 2, small_model());
  EXPECT_EQ(none.ranks.size(), 2u);
  EXPECT_EQ(none.imbalance(), 0);
}

TEST(Ranks, RefusesLessThanOne) {
  EXPECT_EQ(
      message_of<InputError>([] { distribute(build_forest(make_rows({{1}}).view()), 0, small_model()); }),
      "--ranks: expected 1 to 1000000, received 0");
}

// One long path and short ones: the rank that has it takes longer than the mean of any number of others.
TEST(Ranks, GroupsComputeTreesTogether) {
  std::vector<std::vector<int32_t>> rows{std::vector<int32_t>(4000, 1)};
  for (int32_t row = 2; row < 30; ++row) rows.emplace_back(100, row);
  const Forest forest = build_forest(make_rows(rows).view());
  const TimeModel model = small_model();
  const RankPlan alone = distribute(forest, 16, model), groups = distribute(forest, 2, model);
  EXPECT_GT(alone.imbalance(), 2);
  const double per_token = 1e-9;
  const RankPlan plan = distribute(forest, 16, model, 8, per_token);
  EXPECT_EQ(plan.context_parallel, 8);
  ASSERT_EQ(plan.ranks.size(), 2u);
  for (size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(plan.ranks[r].trajectories, groups.ranks[r].trajectories);
    const double received = static_cast<double>(groups.ranks[r].tree_tokens) * 7 / 8;
    EXPECT_NEAR(plan.ranks[r].seconds, groups.ranks[r].seconds / 8 + received * per_token, 1e-15);
  }
  EXPECT_EQ(distribute(forest, 16, model, 1, per_token).seconds(), alone.seconds());
  // The fastest: all ranks together if links cost nothing, and each alone if they cost very much.
  EXPECT_EQ(distribute(forest, 16, model, 0, 0).context_parallel, 16);
  EXPECT_EQ(distribute(forest, 16, model, 0, 1).context_parallel, 1);
  double least = alone.seconds();
  for (const int64_t together : {2, 4, 8, 16}) {
    least = std::min(least, distribute(forest, 16, model, together, per_token).seconds());
  }
  EXPECT_NEAR(distribute(forest, 16, model, 0, per_token).seconds(), least, 2e-3 * least);
  EXPECT_EQ(message_of<InputError>([&] { distribute(forest, 16, model, 3, 0); }),
            "--context-parallel: expected a divisor of --ranks 16, or 0, received 3");
}

TEST(Ranks, TrajectoriesAloneAreEncodedWhole) {
  const Forest forest = build_forest(make_rows({{1, 2, 3}, {1, 2, 4}, {1, 2, 3, 5}}).view());
  const RankPlan plan = distribute_trajectories(forest, 2, small_model());
  EXPECT_EQ(plan.ranks[0].tree_tokens + plan.ranks[1].tree_tokens, forest.flat_tokens());
  EXPECT_EQ(plan.repeated_tokens, forest.flat_tokens() - forest.tree_tokens());
}

}  // namespace
}  // namespace espalier
