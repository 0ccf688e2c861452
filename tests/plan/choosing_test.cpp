// SPDX-License-Identifier: Apache-2.0
// Choosing a plan: auto, memory budgets, and the models by which plans are compared.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
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
using testing::kSmallDecoder;
using testing::seeds;
using testing::small_decoder_costs;

Forest synthetic(uint64_t seed, int64_t trees = 1) {
  return testing::forest_of(synthesize({.num_trees = trees,
                                        .depth = 4,
                                        .branching = 3,
                                        .node_length = 60,
                                        .end_inside = 0.2,
                                        .seed = testing::test_seed(seed)}));
}

PlanOptions with_tokens(Strategy strategy, int64_t tokens) {
  PlanOptions options;
  options.strategy = strategy;
  options.token_budget = tokens;
  return options;
}

PlanOptions with_bytes(Strategy strategy, double bytes) {
  PlanOptions options;
  options.strategy = strategy;
  options.memory_budget = static_cast<int64_t>(bytes);
  return options;
}

TEST(Choosing, AutoIsTheFastestOfAll) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    const Forest forest = synthetic(seed, 1 + static_cast<int64_t>(seed % 3));
    for (const int64_t budget :
         {longest_trajectory(forest), forest.tree_tokens() / 2, forest.tree_tokens()}) {
      const Plan chosen = make_plan(forest, with_tokens(Strategy::kAuto, budget), small_decoder_costs());
      EXPECT_NE(chosen.options.strategy, Strategy::kAuto);
      const double seconds = price(small_decoder_costs(), chosen).seconds;
      for (const Strategy strategy : {Strategy::kPartition, Strategy::kTreePacking, Strategy::kAppendOnly,
                                      Strategy::kSequencePacking}) {
        const Plan other = make_plan(forest, with_tokens(strategy, budget), small_decoder_costs());
        EXPECT_LE(seconds, price(small_decoder_costs(), other).seconds) << to_string(strategy);
      }
      for (const MicroBatch& micro_batch : chosen.micro_batches) EXPECT_LE(micro_batch.num_tokens, budget);
    }
  }
}

TEST(Choosing, AutoCutsWhatNoOtherStrategyTakes) {
  const Forest forest = synthetic(3);
  const int64_t budget = longest_trajectory(forest) / 2;
  EXPECT_THROW(make_plan(forest, with_tokens(Strategy::kTreePacking, budget), small_decoder_costs()),
               InputError);
  const Plan plan = make_plan(forest, with_tokens(Strategy::kAuto, budget), small_decoder_costs());
  EXPECT_EQ(plan.options.strategy, Strategy::kPartition);
  EXPECT_EQ(plan.num_tokens(), forest.tree_tokens());
}

TEST(Choosing, MemoryBudgetsAreKept) {
  const Forest forest = synthetic(5);
  const PlanCosts model = small_decoder_costs();
  const double resident = resident_bytes(model.memory);
  const double whole = price(model, make_plan(forest, with_tokens(Strategy::kTreePacking, 0), model)).bytes;
  for (const Strategy strategy : {Strategy::kAuto, Strategy::kPartition, Strategy::kTreePacking,
                                  Strategy::kAppendOnly, Strategy::kSequencePacking}) {
    double slower = 0;
    for (const double share : {1.0, 0.6, 0.4}) {
      SCOPED_TRACE(fmt::format("{} with {} of the whole", to_string(strategy), share));
      const double budget = resident + share * (whole - resident);
      const Plan plan = make_plan(forest, with_bytes(strategy, budget), model);
      EXPECT_LE(price(model, plan).bytes, budget);
      EXPECT_GT(plan.options.token_budget, 0);
      EXPECT_GE(price(model, plan).seconds, slower * 0.9);  // less memory is hardly ever faster
      slower = price(model, plan).seconds;
    }
  }
}

TEST(Choosing, TheSmallestMemoryThatWorksIsNamedAndWorks) {
  const Forest forest = synthetic(6);
  for (const Strategy strategy : {Strategy::kPartition, Strategy::kTreePacking, Strategy::kAuto}) {
    SCOPED_TRACE(to_string(strategy));
    const std::string text = testing::message_of<InputError>(
        [&] { make_plan(forest, with_bytes(strategy, 1000), small_decoder_costs()); });
    const std::string before = "the smallest plan found needs ";
    ASSERT_NE(text.find(before), std::string::npos) << text;
    // "... needs 3.5 MiB (3,670,016 bytes)": the bytes are exact.
    const double smallest = std::stod(text.substr(text.find('(', text.find(before)) + 1)) + 1;
    EXPECT_NO_THROW(make_plan(forest, with_bytes(strategy, smallest), small_decoder_costs()));
  }
}

// The plans of a strategy under all token budgets that it takes, in small steps.
std::vector<PlanPrice> prices_of_all(const Forest& forest, Strategy strategy) {
  const int64_t smallest = strategy == Strategy::kPartition ? 1 : longest_trajectory(forest);
  std::vector<PlanPrice> prices;
  for (int64_t budget = forest.flat_tokens(); budget >= smallest;
       budget -= std::max<int64_t>(1, budget / 20)) {
    prices.push_back(price(small_decoder_costs(),
                           make_plan(forest, with_tokens(strategy, budget), small_decoder_costs())));
  }
  return prices;
}

TEST(Choosing, FewPlansFindWhatAllWould) {
  for (const uint64_t seed : {6, 8, 9}) {
    if (kIsSanitized && seed != 6) continue;
    const Forest forest = synthetic(seed, 1 + static_cast<int64_t>(seed % 3));
    for (const Strategy strategy :
         {Strategy::kPartition, Strategy::kTreePacking, Strategy::kAppendOnly, Strategy::kSequencePacking}) {
      const std::vector<PlanPrice> prices = prices_of_all(forest, strategy);
      double least = prices.front().bytes;
      for (const PlanPrice& each : prices) least = std::min(least, each.bytes);
      for (const double share : {1.0, 1.1, 1.5, 2.5, 6.0, 20.0}) {
        SCOPED_TRACE(fmt::format("seed {}, {}, {} of the least memory", seed, to_string(strategy), share));
        const double bytes = share * least;
        double fastest = std::numeric_limits<double>::infinity();
        for (const PlanPrice& each : prices) {
          if (each.bytes <= bytes) fastest = std::min(fastest, each.seconds);
        }
        const Plan plan = make_plan(forest, with_bytes(strategy, bytes * 1.05), small_decoder_costs());
        // The search finds memory to within a twentieth, because it tries token budgets in steps of a fifth.
        EXPECT_LE(price(small_decoder_costs(), plan).seconds, fastest * 1.2);
      }
    }
  }
}

TEST(Choosing, CheckpointingTakesLessMemoryAndMoreTime) {
  const Forest forest = synthetic(7);
  PlanOptions options = with_tokens(Strategy::kPartition, 300);
  const Plan kept = make_plan(forest, options, small_decoder_costs());
  options.checkpoint_activations = CheckpointActivations::kPiece;
  const Plan piece = make_plan(forest, options, small_decoder_costs());
  options.checkpoint_activations = CheckpointActivations::kLayer;
  const Plan layer = make_plan(forest, options, small_decoder_costs());
  EXPECT_LT(price(small_decoder_costs(), piece).bytes, price(small_decoder_costs(), kept).bytes);
  EXPECT_LT(price(small_decoder_costs(), layer).bytes, price(small_decoder_costs(), kept).bytes);
  EXPECT_GT(price(small_decoder_costs(), piece).seconds, price(small_decoder_costs(), kept).seconds);
  EXPECT_GT(price(small_decoder_costs(), layer).seconds, price(small_decoder_costs(), piece).seconds);
}

// Seconds of the strategy's plan within the bytes under each way of checkpointing; infinite where none fits.
std::map<CheckpointActivations, double> seconds_by_checkpoint(const Forest& forest, PlanOptions options) {
  std::map<CheckpointActivations, double> seconds;
  for (const CheckpointActivations checkpoint :
       {CheckpointActivations::kNone, CheckpointActivations::kLayer, CheckpointActivations::kPiece}) {
    options.checkpoint_activations = checkpoint;
    seconds[checkpoint] = std::numeric_limits<double>::infinity();
    try {
      seconds[checkpoint] =
          price(small_decoder_costs(), make_plan(forest, options, small_decoder_costs())).seconds;
    } catch (const InputError&) {
    }
  }
  return seconds;
}

TEST(Choosing, AutoCheckpointsWhereThatIsFastest) {
  for (const Strategy strategy : {Strategy::kPartition, Strategy::kAuto}) {
    std::set<CheckpointActivations> chosen;
    for (uint64_t seed = 0; seed < seeds(4); ++seed) {
      const Forest forest = synthetic(seed);
      PlanOptions options = with_tokens(strategy, 0);
      options.checkpoint_activations = CheckpointActivations::kAuto;
      const Plan whole = make_plan(forest, options, small_decoder_costs());
      EXPECT_EQ(whole.options.checkpoint_activations, CheckpointActivations::kNone);  // no memory budget
      const double resident = resident_bytes(small_decoder_costs().memory),
                   most = price(small_decoder_costs(), whole).bytes;
      for (const double share : {1.0, 0.5, 0.3, 0.2, 0.15, 0.1, 0.05}) {
        SCOPED_TRACE(fmt::format("{}, seed {}, {} of the whole", to_string(strategy), seed, share));
        options.memory_budget = static_cast<int64_t>(resident + share * (most - resident));
        const std::map<CheckpointActivations, double> seconds = seconds_by_checkpoint(forest, options);
        double fastest = std::numeric_limits<double>::infinity();
        for (const auto& [checkpoint, own] : seconds) fastest = std::min(fastest, own);
        if (std::isinf(fastest)) {
          EXPECT_THROW(make_plan(forest, options, small_decoder_costs()), InputError);
          continue;
        }
        const Plan plan = make_plan(forest, options, small_decoder_costs());
        EXPECT_LE(price(small_decoder_costs(), plan).bytes, static_cast<double>(options.memory_budget));
        EXPECT_DOUBLE_EQ(price(small_decoder_costs(), plan).seconds, fastest);
        ASSERT_NE(plan.options.checkpoint_activations, CheckpointActivations::kAuto);
        chosen.insert(plan.options.checkpoint_activations);
      }
    }
    if (kIsSanitized) continue;
    EXPECT_EQ(chosen.size(), 3u);  // every way is the fastest somewhere
  }
}

TEST(Choosing, RefusesWhatDoesNotGoTogether) {
  const Forest forest = synthetic(1);
  EXPECT_THROW(make_plan(forest, with_bytes(Strategy::kAuto, 1e9)), InputError);  // no model
  EXPECT_THROW(make_plan(forest, with_tokens(Strategy::kAuto, -1), small_decoder_costs()), InputError);
  EXPECT_THROW(make_plan(forest, with_bytes(Strategy::kAuto, -1), small_decoder_costs()), InputError);
  PlanOptions options = with_tokens(Strategy::kTreePacking, 0);
  options.checkpoint_activations = CheckpointActivations::kPiece;
  EXPECT_THROW(make_plan(forest, options, small_decoder_costs()), InputError);
  options = with_tokens(Strategy::kPartition, 0);
  options.offload_context = true;
  EXPECT_THROW(make_plan(forest, options, small_decoder_costs()), InputError);
  options.checkpoint_activations = CheckpointActivations::kPiece;
  EXPECT_NO_THROW(make_plan(forest, options, small_decoder_costs()));
}

TEST(Choosing, LoadsByHand) {
  // A prefix of 3 with two branches of 2; cut before the second branch.
  MicroBatch first, second;
  first.runs = {{0, 3, -1}, {3, 5, 0}};
  first.num_tokens = 5;
  first.num_pairs = 15;
  first.trajectories = {{0, 1}, {1, 1}, {2, 0}};
  second.runs = {{5, 7, -1}};
  second.num_tokens = 2;
  second.num_pairs = 9;
  second.parent = 0;
  second.context_runs = {0};
  second.trajectories = {{2, 0}};
  const std::vector<MicroBatch> plan{first, second};
  const std::vector<Load> loads = loads_of(plan);
  ASSERT_EQ(loads.size(), 2u);
  EXPECT_EQ(loads[0].mask_blocks, 3);  // two triangles and a rectangle
  EXPECT_EQ(loads[0].terms, 5 + 5 + 3);
  EXPECT_TRUE(loads[0].has_readers());
  EXPECT_EQ(loads[1].mask_blocks, 2);  // a triangle and the context
  EXPECT_EQ(loads[1].terms, 2);
  EXPECT_FALSE(loads[1].has_readers());
  EXPECT_EQ(loads[1].parent, 0);

  MemoryModel model = small_decoder_costs().memory;
  const std::vector<double> peaks = peak_bytes(model, loads);
  EXPECT_EQ(peaks[0], resident_bytes(model) + running_bytes(model, loads[0], true));
  // The leaf's backward pass comes first, so its gradients become the sums.
  const double sums = 4.0 * static_cast<double>(model.num_parameters);
  const double context_gradient = 4.0 * 5 * 2 * 2 * 64;  // of one layer: 5 tokens, k and v of 2 heads of 64
  EXPECT_EQ(peaks[1], resident_bytes(model) - sums + held_bytes(model, loads[0]) + context_gradient +
                          running_bytes(model, loads[1], false));
}

TEST(Choosing, TimeIsLinearInItsFeatures) {
  Load load;
  load.tokens = 100;
  load.pairs = 5050;
  load.mask_blocks = 1;
  load.logit_rows = 10;
  const TimeModel model{kSmallDecoder, {1, 2, 3, 4, 5, 6}, true};
  const double after_attention = static_cast<double>(kSmallDecoder.layers.back().weights_after_mixer) /
                                 static_cast<double>(kSmallDecoder.layers.back().weights);
  EXPECT_DOUBLE_EQ(predicted_seconds(model, load, CheckpointActivations::kNone),
                   1 + 4 * (2 + 4 * 5050.0 + 5) + 3 * (4 * 100 - 90 * after_attention) + 6 * 10);
  EXPECT_GT(predicted_seconds(model, load, CheckpointActivations::kLayer),
            predicted_seconds(model, load, CheckpointActivations::kNone));
  EXPECT_EQ(predicted_seconds(model, load, CheckpointActivations::kPiece),
            predicted_seconds(model, load, CheckpointActivations::kNone));  // nobody reads its context
}

}  // namespace
}  // namespace espalier
