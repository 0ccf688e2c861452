// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/planner.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>

#include "espalier/base/check.h"
#include "espalier/tree/synth.h"
#include "tests/base/message_of.h"
#include "tests/test_seed.h"
#include "tests/tree/naive.h"

namespace espalier {
namespace {

using testing::make_rows;
using testing::Rows;
using testing::seeds;
using testing::test_seed;

Plan tree_plan(const Forest& forest, int64_t budget) {
  return make_plan(forest, {.strategy = Strategy::kTreePacking, .token_budget = budget});
}
Plan sequence_plan(const Forest& forest, int64_t budget) {
  return make_plan(forest, {.strategy = Strategy::kSequencePacking, .token_budget = budget});
}

std::string batch_fault(const Rows& rows, std::span<const int64_t> subset, const Forest& forest,
                        const PlanOptions& options, const MicroBatch& batch) {
  const Layout layout = make_layout(forest, batch.runs);
  if (layout.num_tokens() == 0) return "an empty micro-batch";
  if (options.token_budget > 0 && layout.num_tokens() > options.token_budget) return "over the budget";
  if (layout.num_tokens() != batch.num_tokens) return "num_tokens";
  if (visible_pairs(layout) != batch.num_pairs) return "num_pairs";
  std::vector<int64_t> placed_rows, end_runs;
  std::vector<int64_t> users(layout.num_tokens(), 0);
  for (const Placement& placement : batch.trajectories) {
    placed_rows.push_back(subset[placement.trajectory]);
    end_runs.push_back(placement.run);
    for (const int64_t t : path_tokens(layout, placement.run)) ++users[t];
  }
  if (std::string fault = testing::layout_difference(rows, placed_rows, layout, end_runs); !fault.empty()) {
    return fault;
  }
  if (options.strategy == Strategy::kSequencePacking) {
    if (*std::max_element(users.begin(), users.end()) > 1) return "sequence packing shares a token";
  } else if (options.strategy != Strategy::kAppendOnly) {
    const std::set<int64_t> distinct(layout.forest_token.begin(), layout.forest_token.end());
    if (distinct.size() != layout.forest_token.size()) return "a token is repeated in one micro-batch";
  }
  return "";
}

/// The first fault of the plan, or "".
std::string plan_fault(const Rows& rows, std::span<const int64_t> subset, const Forest& forest,
                       const Plan& plan) {
  std::vector<int64_t> times_placed(forest.num_trajectories(), 0);
  for (size_t k = 0; k < plan.micro_batches.size(); ++k) {
    const MicroBatch& batch = plan.micro_batches[k];
    if (std::string fault = batch_fault(rows, subset, forest, plan.options, batch); !fault.empty()) {
      return fmt::format("micro-batch {}: {}", k, fault);
    }
    for (size_t p = 0; p < batch.trajectories.size(); ++p) {
      ++times_placed[batch.trajectories[p].trajectory];
      if (p > 0 && batch.trajectories[p].trajectory <= batch.trajectories[p - 1].trajectory)
        return "not ascending";
    }
  }
  for (const int64_t times : times_placed) {
    if (times != 1) return fmt::format("a trajectory is placed {} times", times);
  }
  return "";
}

bool same(const Plan& a, const Plan& b) {
  const auto same_run = [](const Run& x, const Run& y) {
    return x.begin == y.begin && x.end == y.end && x.parent == y.parent;
  };
  const auto same_placement = [](const Placement& x, const Placement& y) {
    return x.trajectory == y.trajectory && x.run == y.run;
  };
  return std::ranges::equal(a.micro_batches, b.micro_batches, [&](const MicroBatch& x, const MicroBatch& y) {
    return std::ranges::equal(x.runs, y.runs, same_run) &&
           std::ranges::equal(x.trajectories, y.trajectories, same_placement);
  });
}

int64_t largest_tree(const Forest& forest) {
  int64_t largest = 0;
  for (int64_t n = 0; n < forest.num_nodes(); n = forest.subtree_last[n]) {
    largest = std::max(largest, forest.node_begin[forest.subtree_last[n]] - forest.node_begin[n]);
  }
  return largest;
}

void check_plans(const Rows& rows, std::span<const int64_t> subset, int64_t budget) {
  const Forest forest = build_forest(rows.view(), subset);
  const Plan tree = tree_plan(forest, budget), sequence = sequence_plan(forest, budget);
  ASSERT_EQ(plan_fault(rows, subset, forest, tree), "");
  ASSERT_EQ(plan_fault(rows, subset, forest, sequence), "");
  ASSERT_TRUE(same(tree, tree_plan(forest, budget)));
  ASSERT_EQ(sequence.num_tokens(), forest.flat_tokens());
  ASSERT_LE(tree.num_tokens(), sequence.num_tokens());
  ASSERT_LE(tree.num_pairs(), sequence.num_pairs());
  ASSERT_GE(tree.num_tokens(), forest.tree_tokens());
  if (budget == 0 || largest_tree(forest) <= budget) {
    ASSERT_EQ(tree.num_tokens(), forest.tree_tokens());
  }
  if (budget == 0) {
    ASSERT_EQ(tree.micro_batches.size(), 1u);
    ASSERT_EQ(sequence.micro_batches.size(), 1u);
  }
}

TEST(Planner, RandomForests) {
  for (uint64_t seed = 0; seed < seeds(3000); ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(test_seed(seed), 4);
    const Rows rows = testing::random_rows(rng);
    const std::vector<int64_t> subset = testing::random_subset(rng, rows);
    const int64_t smallest = longest_trajectory(build_forest(rows.view(), subset));
    const int64_t budget = rng.below(5) == 0 ? 0 : smallest + rng.below(rng.below(2) == 0 ? 4 : 3 * smallest);
    check_plans(rows, subset, budget);
    if (HasFatalFailure()) return;
  }
}

TEST(Planner, SyntheticForests) {
  for (uint64_t seed = 0; seed < seeds(60); ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(test_seed(seed), 5);
    const SynthOptions options{.num_trees = rng.between(1, 6),
                               .depth = rng.between(1, 4),
                               .branching = rng.between(1, 3),
                               .node_length = rng.between(1, 6),
                               .end_inside = rng.uniform(),
                               .duplicate = rng.uniform(),
                               .seed = test_seed(seed)};
    const Rows rows{synthesize(options), {}, {}};
    std::vector<int64_t> all(rows.tokens.num_rows());
    std::iota(all.begin(), all.end(), 0);
    const int64_t smallest = longest_trajectory(build_forest(rows.view()));
    for (const int64_t budget : {smallest, smallest + 3, 4 * smallest}) {
      check_plans(rows, all, budget);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Planner, SplitsATree) {
  // A root of 10 tokens with four leaves of 10; 30 tokens hold the root and two leaves.
  const Forest forest = build_forest(Rows{
      synthesize({.depth = 2, .branching = 4, .node_length = 10, .fixed_node_length = true}),
      {},
      {}}.view());
  const Plan plan = tree_plan(forest, 30);
  ASSERT_EQ(plan.micro_batches.size(), 2u);
  for (const MicroBatch& batch : plan.micro_batches) {
    EXPECT_EQ(batch.num_tokens, 30);
    EXPECT_EQ(batch.trajectories.size(), 2u);
  }
  EXPECT_EQ(plan.micro_batches[0].trajectories[0].trajectory, 0);
  EXPECT_DOUBLE_EQ(effective_reuse_ratio(forest, plan), (80 - 60) / 80.0);
  EXPECT_DOUBLE_EQ(effective_reuse_ratio(forest, tree_plan(forest, 0)), (80 - 50) / 80.0);
  EXPECT_DOUBLE_EQ(effective_reuse_ratio(forest, sequence_plan(forest, 30)), 0);
}

TEST(Planner, PairsShortLeavesAcrossTheTree) {
  // The long leaf fills a micro-batch; the two short ones, before and after it, share the other.
  const Rows rows = make_rows({{1, 2, 2}, {1, 3, 3, 3, 3, 3, 3, 3, 3}, {1, 4, 4}});
  const Forest forest = build_forest(rows.view());
  const Plan plan = tree_plan(forest, 9);
  ASSERT_EQ(plan.micro_batches.size(), 2u);
  EXPECT_EQ(plan.micro_batches[0].num_tokens, 9);
  EXPECT_EQ(plan.micro_batches[1].num_tokens, 5);  // one shared token and twice two
  EXPECT_EQ(plan.micro_batches[1].runs.size(), 3u);
}

TEST(Planner, SequencePackingUsesLongRuns) {
  const Rows rows = make_rows({{1}, {1, 2}, {1, 2, 3}, {1, 4}});
  const Forest forest = build_forest(rows.view());
  const Plan plan = sequence_plan(forest, 0);
  const MicroBatch& batch = plan.micro_batches.at(0);
  EXPECT_EQ(batch.runs.size(), 5u);  // the first three are contiguous in the forest, the last is not
  EXPECT_EQ(batch.num_tokens, 8);
}

/// Best-fit decreasing by looking at every bin.
std::vector<std::vector<int64_t>> naive_best_fit(const std::vector<int64_t>& sizes, int64_t budget) {
  std::vector<int64_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](int64_t a, int64_t b) { return sizes[a] != sizes[b] ? sizes[a] > sizes[b] : a < b; });
  std::vector<std::vector<int64_t>> bins;
  std::vector<int64_t> room;
  for (const int64_t item : order) {
    size_t best = bins.size();
    for (size_t b = 0; b < bins.size(); ++b) {
      if (room[b] >= sizes[item] && (best == bins.size() || room[b] < room[best])) best = b;
    }
    if (best == bins.size()) {
      bins.emplace_back();
      room.push_back(budget);
    }
    bins[best].push_back(item);
    room[best] -= sizes[item];
  }
  for (auto& bin : bins) std::sort(bin.begin(), bin.end());
  return bins;
}

TEST(Planner, PacksBestFitDecreasing) {
  for (uint64_t seed = 0; seed < seeds(200); ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(test_seed(seed), 6);
    Rows rows;
    std::vector<int64_t> sizes;
    const int64_t count = rng.between(1, 40);
    for (int32_t r = 0; r < count; ++r) {
      sizes.push_back(rng.between(1, 20));
      rows.tokens.push_row(std::vector<int32_t>(sizes.back(), r));
    }
    const int64_t budget = rng.between(20, 50);
    const Forest forest = build_forest(rows.view());
    const auto expected = naive_best_fit(sizes, budget);
    for (const Plan& plan : {tree_plan(forest, budget), sequence_plan(forest, budget)}) {
      ASSERT_EQ(plan.micro_batches.size(), expected.size());
      for (size_t b = 0; b < expected.size(); ++b) {
        std::vector<int64_t> packed;
        for (const Placement& placement : plan.micro_batches[b].trajectories)
          packed.push_back(placement.trajectory);
        ASSERT_EQ(packed, expected[b]);
      }
    }
  }
}

TEST(Planner, DepthOfAHundredThousandNodes) {
  constexpr int64_t kDepth = 100'000;
  Forest forest;
  forest.tokens.assign(kDepth, 1);
  forest.node_begin.push_back(0);
  for (int64_t n = 0; n < kDepth; ++n) {
    forest.node_begin.push_back(n + 1);
    forest.parent.push_back(n - 1);
    forest.position.push_back(n);
    forest.end_node.push_back(n);
    forest.multiplicity.push_back(kDepth - n);
    forest.subtree_last.push_back(kDepth);
  }
  const Plan tree = tree_plan(forest, kDepth), sequence = sequence_plan(forest, 0);
  ASSERT_EQ(tree.micro_batches.size(), 1u);
  EXPECT_EQ(tree.num_tokens(), kDepth);
  EXPECT_EQ(tree.num_pairs(), kDepth * (kDepth + 1) / 2);
  EXPECT_EQ(sequence.num_tokens(), kDepth * (kDepth + 1) / 2);
  EXPECT_EQ(sequence.micro_batches.at(0).runs.size(), static_cast<size_t>(kDepth));
}

TEST(Planner, EmptyForest) {
  const Forest forest = build_forest(make_rows({}).view());
  EXPECT_TRUE(tree_plan(forest, 5).micro_batches.empty());
  EXPECT_TRUE(sequence_plan(forest, 0).micro_batches.empty());
  EXPECT_EQ(effective_reuse_ratio(forest, tree_plan(forest, 0)), 0);
  EXPECT_EQ(longest_trajectory(forest), 0);
}

TEST(Planner, RefusesBudgetsThatAreTooSmall) {
  const Forest forest = build_forest(make_rows({{1, 2}, {1, 2, 3, 4}, {1, 2, 3, 4, 5, 6}}).view());
  EXPECT_EQ(longest_trajectory(forest), 6);
  for (const Strategy strategy :
       {Strategy::kTreePacking, Strategy::kAppendOnly, Strategy::kSequencePacking}) {
    EXPECT_EQ(testing::message_of<InputError>(
                  [&] { make_plan(forest, {.strategy = strategy, .token_budget = 3}); }),
              "trajectory 1 has 4 tokens, more than the token budget 3: expected a budget of at least 6, the "
              "longest trajectory, or --strategy partition, which cuts trajectories");
    EXPECT_THROW(make_plan(forest, {.strategy = strategy, .token_budget = -1}), InputError);
    EXPECT_NO_THROW(make_plan(forest, {.strategy = strategy, .token_budget = 6}));
  }
}

TEST(Planner, StrategyNames) {
  for (const Strategy strategy : {Strategy::kAuto, Strategy::kPartition, Strategy::kTreePacking,
                                  Strategy::kAppendOnly, Strategy::kSequencePacking}) {
    EXPECT_EQ(parse_strategy(to_string(strategy)), strategy);
  }
  EXPECT_EQ(
      testing::message_of<InputError>([] { parse_strategy("trees"); }),
      "strategy: expected auto, partition, tree-packing, append-only or sequence-packing, received `trees`");
}

// Negative controls: the plan check must see each single fault.
TEST(Planner, PlanCheckSeesFaults) {
  const Rows rows = make_rows({{1, 2, 3, 4}, {1, 2, 5}, {9, 9}, {1, 2, 3, 7}, {1, 2}});
  const std::vector<int64_t> all{0, 1, 2, 3, 4};
  const Forest forest = build_forest(rows.view());
  const std::vector<std::pair<const char*, std::function<void(Plan&)>>> faults = {
      {"a trajectory lost", [](Plan& p) { p.micro_batches[0].trajectories.pop_back(); }},
      {"a trajectory twice", [](Plan& p) { p.micro_batches.push_back(p.micro_batches[0]); }},
      {"over the budget", [](Plan& p) { p.options.token_budget = 4; }},
      {"tokens miscounted", [](Plan& p) { ++p.micro_batches[0].num_tokens; }},
      {"pairs miscounted", [](Plan& p) { --p.micro_batches[0].num_pairs; }},
      {"a wrong run", [](Plan& p) { --p.micro_batches[0].trajectories[1].run; }},
  };
  for (const Plan& good : {tree_plan(forest, 9), sequence_plan(forest, 9)}) {
    ASSERT_EQ(plan_fault(rows, all, forest, good), "");
    for (const auto& [name, fault] : faults) {
      Plan bad = good;
      fault(bad);
      EXPECT_NE(plan_fault(rows, all, forest, bad), "") << name << ", " << to_string(good.options.strategy);
    }
  }
  Plan shared = tree_plan(forest, 0);
  shared.options.strategy = Strategy::kSequencePacking;
  EXPECT_NE(plan_fault(rows, all, forest, shared), "");
  Plan repeated = sequence_plan(forest, 0);
  repeated.options.strategy = Strategy::kTreePacking;
  EXPECT_NE(plan_fault(rows, all, forest, repeated), "");
}

}  // namespace
}  // namespace espalier
