// SPDX-License-Identifier: Apache-2.0
// Comparing the ways of planning: what is chosen is what make_plan makes, and what does not fit is told.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/plan/planner.h"
#include "espalier/tree/synth.h"
#include "tests/base/message_of.h"
#include "tests/plan/small_decoder.h"
#include "tests/test_seed.h"
#include "tests/tree/naive.h"

namespace espalier {
namespace {

using testing::kIsSanitized;
using testing::seeds;
using testing::small_decoder_costs;

constexpr Strategy kAll[] = {Strategy::kAuto, Strategy::kPartition, Strategy::kTreePacking,
                             Strategy::kAppendOnly, Strategy::kSequencePacking};

Forest several_trees(uint64_t seed) {
  return testing::forest_of(synthesize({.num_trees = 1 + static_cast<int64_t>(seed % 3),
                                        .depth = 3,
                                        .branching = 3,
                                        .node_length = 50,
                                        .end_inside = 0.2,
                                        .seed = testing::test_seed(seed)}));
}

/// Options that leave a choice: token budgets, then memory budgets from plenty to hardly any, of this forest.
std::vector<PlanOptions> budgets_of(const Forest& forest) {
  std::vector<PlanOptions> all;
  for (const int64_t tokens :
       {longest_trajectory(forest) / 2, longest_trajectory(forest), forest.tree_tokens() / 2, int64_t{0}}) {
    all.push_back({.token_budget = tokens});
  }
  const double resident = resident_bytes(small_decoder_costs().memory);
  const double most = price(small_decoder_costs(), make_plan(forest, {.strategy = Strategy::kSequencePacking},
                                                             small_decoder_costs()))
                          .bytes;
  for (const double share : {1.1, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02}) {
    const auto bytes = static_cast<int64_t>(resident + share * (most - resident));
    all.push_back({.checkpoint_activations = CheckpointActivations::kAuto, .memory_budget = bytes});
    all.push_back({.memory_budget = bytes});
  }
  return all;
}

/// Rates by which smaller micro-batches are faster, which no machine has: make_plan gives up ways that would
/// turn out to be the fastest.
PlanCosts reversed_costs() {
  PlanCosts reversed = small_decoder_costs();
  reversed.time.seconds = {-1, 0, 0, 0, 0, 0.2};
  return reversed;
}

/// All of a plan as numbers: of equal plans the same.
std::vector<int64_t> numbers_of(const Plan& plan) {
  const PlanOptions& options = plan.options;
  std::vector<int64_t> numbers{static_cast<int64_t>(options.strategy), options.token_budget,
                               static_cast<int64_t>(options.checkpoint_activations), options.offload_context,
                               options.memory_budget};
  const auto append = [&](std::initializer_list<int64_t> more) { numbers.insert(numbers.end(), more); };
  for (const MicroBatch& batch : plan.micro_batches) {
    append({batch.parent, batch.num_tokens, batch.num_pairs, std::ssize(batch.runs),
            std::ssize(batch.trajectories), std::ssize(batch.context_runs)});
    for (const Run& run : batch.runs) append({run.begin, run.end, run.parent});
    for (const Placement& placement : batch.trajectories) append({placement.trajectory, placement.run});
    for (const int64_t run : batch.context_runs) append({run});
  }
  return numbers;
}

/// The plan as numbers; or nothing, and the message of the error.
std::vector<int64_t> plan_or_nothing(const Forest& forest, const PlanOptions& options, std::string* error,
                                     const PlanCosts& by = small_decoder_costs()) {
  std::vector<int64_t> plan;
  *error = testing::message_of<InputError>([&] { plan = numbers_of(make_plan(forest, options, by)); });
  return plan;
}

/// Counts of comparisons with a plan and without, after all of them agree with make_plan.
struct Agreement {
  int64_t plans = 0, errors = 0;
};

Agreement check_against_make_plan(const Forest& forest, const PlanCosts& by) {
  Agreement count;
  for (PlanOptions options : budgets_of(forest)) {
    for (const Strategy strategy : kAll) {
      options.strategy = strategy;
      SCOPED_TRACE(fmt::format("{}, {} tokens, {} bytes, checkpointing {}", to_string(strategy),
                               options.token_budget, options.memory_budget,
                               to_string(options.checkpoint_activations)));
      std::string error;
      const std::vector<int64_t> expected = plan_or_nothing(forest, options, &error, by);
      if (!error.empty()) {
        ++count.errors;
        EXPECT_EQ(testing::message_of<InputError>([&] { compare_plans(forest, options, by); }), error);
        continue;
      }
      ++count.plans;
      const PlanComparison comparison = compare_plans(forest, options, by);
      const Candidate& chosen = comparison.candidates.at(comparison.chosen);
      if (!chosen.plan) {
        ADD_FAILURE() << "the chosen candidate has no plan";
        continue;
      }
      EXPECT_EQ(numbers_of(*chosen.plan), expected);
      EXPECT_DOUBLE_EQ(chosen.price.seconds, price(by, *chosen.plan).seconds);
    }
  }
  return count;
}

TEST(PlanComparison, ChoosesWhatMakePlanMakes) {
  for (const PlanCosts& by : {small_decoder_costs(), reversed_costs()}) {
    Agreement all;
    for (uint64_t seed = 0; seed < seeds(6); ++seed) {
      SCOPED_TRACE(seed);
      const Agreement one = check_against_make_plan(several_trees(seed), by);
      all.plans += one.plans;
      all.errors += one.errors;
    }
    if (kIsSanitized) continue;
    EXPECT_GT(all.plans, 100);
    EXPECT_GT(all.errors, 10);
  }
}

TEST(PlanComparison, EveryCandidateIsThePlanOfItsOwnWay) {
  for (uint64_t seed = 0; seed < seeds(3); ++seed) {
    const Forest forest = several_trees(seed);
    for (PlanOptions options : budgets_of(forest)) {
      options.strategy = Strategy::kAuto;
      std::string error;
      if (plan_or_nothing(forest, options, &error).empty()) continue;
      const PlanComparison comparison = compare_plans(forest, options, small_decoder_costs());
      const bool ways =
          options.memory_budget > 0 && options.checkpoint_activations == CheckpointActivations::kAuto;
      EXPECT_EQ(comparison.candidates.size(), ways ? 7u : 3u);
      for (const Candidate& candidate : comparison.candidates) {
        SCOPED_TRACE(fmt::format("seed {}, {}, {} tokens, {} bytes, checkpointing {}", seed,
                                 to_string(candidate.options.strategy), options.token_budget,
                                 options.memory_budget, to_string(candidate.options.checkpoint_activations)));
        const std::vector<int64_t> own = plan_or_nothing(forest, candidate.options, &error);
        EXPECT_EQ(candidate.plan ? numbers_of(*candidate.plan) : std::vector<int64_t>(), own);
      }
    }
  }
}

TEST(PlanComparison, TheSmallestBudgetThatFitsIsNamedAndFits) {
  int64_t named_bytes = 0, named_tokens = 0;
  for (uint64_t seed = 0; seed < seeds(4); ++seed) {
    const Forest forest = several_trees(seed);
    for (PlanOptions options : budgets_of(forest)) {
      options.strategy = Strategy::kAuto;
      std::string error;
      if (plan_or_nothing(forest, options, &error).empty()) continue;
      for (const Candidate& candidate : compare_plans(forest, options, small_decoder_costs()).candidates) {
        if (candidate.plan) {
          EXPECT_EQ(candidate.least_tokens, 0);
          continue;
        }
        PlanOptions enough = candidate.options, less = candidate.options;
        if (candidate.least_tokens > 0) {
          ++named_tokens;
          enough.token_budget = candidate.least_tokens;
          less.token_budget = candidate.least_tokens - 1;
        } else {
          ++named_bytes;
          ASSERT_GT(candidate.least_bytes, static_cast<double>(options.memory_budget));
          enough.memory_budget = static_cast<int64_t>(std::ceil(candidate.least_bytes));
          less.memory_budget = static_cast<int64_t>(std::ceil(candidate.least_bytes)) - 1;
        }
        EXPECT_NO_THROW(make_plan(forest, enough, small_decoder_costs()));
        EXPECT_THROW(make_plan(forest, less, small_decoder_costs()), InputError);
      }
    }
  }
  EXPECT_GT(named_bytes, kIsSanitized ? 0 : 5);
  EXPECT_GT(named_tokens, kIsSanitized ? 0 : 5);
}

TEST(PlanComparison, AStrategyThatFitsNothingFailsThoughAnotherFits) {
  const Forest forest = several_trees(1);
  int64_t found = 0;
  for (PlanOptions options : budgets_of(forest)) {
    std::string error;
    options.strategy = Strategy::kPartition;
    if (options.memory_budget == 0 || plan_or_nothing(forest, options, &error).empty()) continue;
    for (const Strategy strategy :
         {Strategy::kTreePacking, Strategy::kAppendOnly, Strategy::kSequencePacking}) {
      options.strategy = strategy;
      if (!plan_or_nothing(forest, options, &error).empty()) continue;
      ++found;
      EXPECT_THROW(compare_plans(forest, options, small_decoder_costs()), InputError);
    }
  }
  EXPECT_GT(found, 0);
}

TEST(PlanComparison, ProgressRisesToTheEnd) {
  const Forest forest = several_trees(2);
  const PlanOptions options = budgets_of(forest).at(8);
  ASSERT_GT(options.memory_budget, 0);
  std::vector<double> told;
  std::vector<std::string> ways;
  compare_plans(forest, {.strategy = Strategy::kAuto, .memory_budget = options.memory_budget},
                small_decoder_costs(), [&](const PlanOptions& way, double fraction) {
                  told.push_back(fraction);
                  if (ways.empty() || ways.back() != to_string(way.strategy)) {
                    ways.emplace_back(to_string(way.strategy));
                  }
                });
  EXPECT_GT(told.size(), 3u);
  EXPECT_TRUE(std::is_sorted(told.begin(), told.end()));
  EXPECT_GE(told.front(), 0);
  EXPECT_LE(told.back(), 1);
  EXPECT_EQ(ways, (std::vector<std::string>{"tree-packing", "partition", "sequence-packing"}));
}

TEST(PlanComparison, WithoutAModel) {
  const Forest forest = several_trees(3);
  for (const Strategy strategy : kAll) {
    const PlanOptions options{.strategy = strategy, .token_budget = longest_trajectory(forest)};
    const PlanComparison comparison = compare_plans(forest, options);
    EXPECT_EQ(numbers_of(*comparison.candidates.at(comparison.chosen).plan),
              numbers_of(make_plan(forest, options)));
  }
  EXPECT_THROW(compare_plans(forest, {.memory_budget = 1 << 30}), InputError);
}

}  // namespace
}  // namespace espalier
