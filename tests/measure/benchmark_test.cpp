// SPDX-License-Identifier: Apache-2.0
// The benchmark's measurements agree with counts made by hand and with each other.
#include "espalier/measure/benchmark.h"

#include <gtest/gtest.h>

#include <cmath>

#include "espalier/base/check.h"
#include "espalier/data/builder.h"
#include "espalier/measure/workloads.h"
#include "espalier/runtime/tensor_memory.h"
#include "tests/engine/tiny_models.h"

namespace espalier::testing {
namespace {

/// A prompt of 8 tokens with four responses of 4 tokens: 24 tree tokens, 48 flat tokens.
Trajectories prompt_with_responses() {
  std::vector<std::vector<int32_t>> rows;
  for (int32_t response = 0; response < 4; ++response) {
    rows.push_back({1, 2, 3, 4, 5, 6, 7, 8});
    for (int32_t t = 0; t < 4; ++t) rows.back().push_back(10 + response + t);
  }
  return from_rows(rows);
}

struct Expected {
  const char* name;
  Strategy strategy;
  int64_t token_budget, micro_batches, encoded_tokens;
};

// At two thirds of the tree: 16 tokens. Tree packing repeats the prompt once, sequence packing fits one
// trajectory.
const Expected kExpected[] = {{"whole tree", Strategy::kTreePacking, 24, 1, 24},
                              {"partition", Strategy::kPartition, 16, 2, 24},
                              {"tree packing", Strategy::kTreePacking, 16, 2, 32},
                              {"sequence packing", Strategy::kSequencePacking, 16, 4, 48}};

/// What is wrong with a side of a result of three rounds; empty: nothing.
std::string fault_of(const SideResult& side, const Expected& expected) {
  if (side.side.name != expected.name) return "name";
  if (side.side.plan.strategy != expected.strategy) return "strategy";
  if (side.side.plan.token_budget != expected.token_budget) return "token budget";
  if (side.micro_batches != expected.micro_batches) return "micro-batches";
  if (side.encoded_tokens != expected.encoded_tokens) return "encoded tokens";
  if (side.seconds.size() != 3) return "rounds";
  for (const double value :
       {side.seconds[0], side.seconds[1], side.seconds[2], side.flops, side.plan_flops}) {
    if (!std::isfinite(value) || value <= 0) return "not finite or not positive";
  }
  if (side.working_bytes <= 0 || side.working_bytes >= side.peak_bytes) return "memory";
  return "";
}

BenchmarkResult measure_prompt_with_responses() {
  count_tensor_memory();
  const Decoder decoder = tiny_decoder(tiny_config(Family::kLlama, 19), 3, at::kFloat);
  const Trajectories trajectories = prompt_with_responses();
  const Forest forest = forest_of(trajectories, {});
  return benchmark(decoder, trajectories, strategy_sides(forest, 2.0 / 3), {.repeats = 3});
}

TEST(Benchmark, FiguresAreThoseCountedByHand) {
  const BenchmarkResult result = measure_prompt_with_responses();
  EXPECT_EQ(result.flat_tokens, 48);
  EXPECT_EQ(result.tree_tokens, 24);
  ASSERT_EQ(result.sides.size(), std::size(kExpected));
  for (size_t s = 0; s < result.sides.size(); ++s) {
    EXPECT_EQ(fault_of(result.sides[s], kExpected[s]), "") << kExpected[s].name;
  }
  const SideResult &whole = result.sides[0], &partition = result.sides[1], &packed = result.sides[2],
                   &baseline = result.sides[3];
  for (const SideResult& side : result.sides) {
    EXPECT_NEAR(side.loss, baseline.loss, 1e-5 * baseline.loss) << side.side.name;
    EXPECT_NEAR(side.grad_norm, baseline.grad_norm, 1e-4 * baseline.grad_norm) << side.side.name;
  }
  EXPECT_DOUBLE_EQ(baseline.plan_flops, result.packing_flops);
  EXPECT_DOUBLE_EQ(partition.plan_flops, whole.plan_flops);  // nothing is computed twice
  EXPECT_GT(packed.plan_flops, whole.plan_flops);
  EXPECT_GT(baseline.plan_flops, packed.plan_flops);
}

TEST(Benchmark, CheckSeesFaults) {
  const BenchmarkResult result = measure_prompt_with_responses();
  const auto broken = [&](const auto& change) {
    SideResult side = result.sides[2];
    change(side);
    return fault_of(side, kExpected[2]);
  };
  EXPECT_EQ(broken([](SideResult& side) { side.encoded_tokens = 24; }), "encoded tokens");
  EXPECT_EQ(broken([](SideResult& side) { side.micro_batches = 1; }), "micro-batches");
  EXPECT_EQ(broken([](SideResult& side) { side.seconds.push_back(1); }), "rounds");
  EXPECT_EQ(broken([](SideResult& side) { side.seconds[1] = NAN; }), "not finite or not positive");
  EXPECT_EQ(broken([](SideResult& side) { side.plan_flops = 0; }), "not finite or not positive");
  EXPECT_EQ(broken([](SideResult& side) { side.working_bytes = side.peak_bytes; }), "memory");
  // A side that ran under another's plan.
  EXPECT_EQ(fault_of(result.sides[1], kExpected[2]), "name");
}

TEST(Benchmark, PackingBudgetIsAtLeastTheLongestTrajectory) {
  const Forest forest = forest_of(prompt_with_responses(), {});
  const std::vector<BenchmarkSide> sides = strategy_sides(forest, 0.25);
  EXPECT_EQ(sides[0].plan.token_budget, 24);
  EXPECT_EQ(sides[1].plan.token_budget, 6);
  EXPECT_EQ(sides[2].plan.token_budget, 12);
  EXPECT_EQ(sides[3].plan.token_budget, 12);
  EXPECT_THROW(strategy_sides(forest, 0), InputError);
  EXPECT_THROW(strategy_sides(forest, 1.5), InputError);
}

TEST(Benchmark, TokensThatNoLossReachesAreNotCounted) {
  TrajectoriesBuilder builder;
  builder.append({.input_ids = {1, 2, 3, 4}, .loss_weights = {0, 0, 1, 1}});
  builder.append({.input_ids = {5, 6, 7}, .loss_weights = {0, 0, 0}});
  const Trajectories trajectories = builder.finish();
  const Decoder decoder = tiny_decoder(tiny_config(Family::kLlama, 19), 3, at::kFloat);
  const std::vector<BenchmarkSide> sides = {{"packing", {Strategy::kSequencePacking, 4}}};
  const BenchmarkResult result = benchmark(decoder, trajectories, sides, {.repeats = 1, .warmup = 0});
  EXPECT_EQ(result.sides[0].micro_batches, 1);
  EXPECT_EQ(result.sides[0].encoded_tokens, 4);
}

/// Three turns of a conversation, of which each has its own loss, and another end of it twice.
Trajectories turns() {
  TrajectoriesBuilder builder;
  const std::vector<int32_t> path = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  for (const int64_t size : {6, 9, 12}) {
    std::vector<double> weights(size, 0);
    std::fill(weights.end() - 2, weights.end(), 1);
    builder.append({.input_ids = {path.begin(), path.begin() + size}, .loss_weights = weights});
  }
  for (int copy = 0; copy < 2; ++copy) {
    builder.append({.input_ids = {1, 2, 3, 4, 5, 6, 20, 21}, .loss_weights = {0, 0, 0, 0, 0, 0, 1, 2}});
  }
  return builder.finish();
}

TEST(Benchmark, AppendOnlyMergingIsASideWhereThereIsAnythingToMerge) {
  const Trajectories trajectories = turns();
  const Forest forest = forest_of(trajectories, {});
  const Decoder decoder = tiny_decoder(tiny_config(Family::kLlama, 31), 3, at::kDouble);
  const auto sides = tree_and_packing_sides(forest, Strategy::kTreePacking, 0);
  ASSERT_EQ(sides.size(), 3U);
  const BenchmarkResult result = benchmark(decoder, trajectories, sides, {.repeats = 3});
  EXPECT_EQ(result.flat_tokens, 43);
  EXPECT_EQ(result.append_only_tokens, 20);
  EXPECT_EQ(result.tree_tokens, 14);
  const SideResult &tree = result.sides[0], &merging = result.sides[1], &packing = result.sides[2];
  EXPECT_EQ(merging.side.plan.strategy, Strategy::kAppendOnly);
  EXPECT_EQ(merging.encoded_tokens, 20);
  for (const SideResult& side : result.sides) {
    EXPECT_NEAR(side.loss, packing.loss, 1e-12 * packing.loss) << side.side.name;
    EXPECT_NEAR(side.grad_norm, packing.grad_norm, 1e-12 * packing.grad_norm) << side.side.name;
  }
  EXPECT_DOUBLE_EQ(merging.plan_flops, result.append_only_flops);
  EXPECT_DOUBLE_EQ(packing.plan_flops, result.packing_flops);
  EXPECT_LT(tree.plan_flops, merging.plan_flops);
  EXPECT_LT(merging.plan_flops, packing.plan_flops);
}

TEST(Benchmark, WhereNothingCanBeMergedPackingIsWhatMergingLeaves) {
  const Trajectories trajectories = prompt_with_responses();
  const Forest forest = forest_of(trajectories, {});
  const auto sides = tree_and_packing_sides(forest, Strategy::kTreePacking, 0);
  ASSERT_EQ(sides.size(), 2U);
  const Decoder decoder = tiny_decoder(tiny_config(Family::kLlama, 31), 3, at::kFloat);
  const BenchmarkResult result = benchmark(decoder, trajectories, sides, {.repeats = 1});
  EXPECT_EQ(result.append_only_tokens, result.flat_tokens);
  EXPECT_EQ(result.append_only_flops, result.packing_flops);
}

}  // namespace
}  // namespace espalier::testing
