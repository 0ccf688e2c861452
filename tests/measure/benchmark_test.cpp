// SPDX-License-Identifier: Apache-2.0
// The benchmark's figures agree with counts made by hand and with each other; its table and JSON have them
// all.
#include "espalier/measure/benchmark.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include <nlohmann/json.hpp>

#include "espalier/base/check.h"
#include "espalier/cli/commands/commands.h"
#include "espalier/cli/flags/arguments.h"
#include "espalier/data/builder.h"
#include "espalier/measure/workloads.h"
#include "espalier/runtime/tensor_memory.h"
#include "tests/base/scratch_folder.h"
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

bool near(double a, double b) {
  return std::abs(a - b) <= 1e-12 * std::abs(b);
}

/// What is wrong with a side of a result over 48 flat tokens; empty: nothing.
std::string fault_of(const SideResult& side, const Expected& expected) {
  if (side.side.name != expected.name) return "name";
  if (side.side.plan.strategy != expected.strategy) return "strategy";
  if (side.side.plan.token_budget != expected.token_budget) return "token budget";
  if (side.micro_batches != expected.micro_batches) return "micro-batches";
  if (side.encoded_tokens != expected.encoded_tokens) return "encoded tokens";
  if (!near(1 + side.err, 2 - static_cast<double>(expected.encoded_tokens) / 48)) return "ERR";
  for (const double value : {side.seconds, side.speedup, side.speedup_low, side.speedup_high,
                             side.relative_speed, side.bound, side.share_of_bound, side.tflops_per_second}) {
    if (!std::isfinite(value) || value <= 0) return "not finite or not positive";
  }
  if (side.bound < 1 - 1e-12) return "bound below 1";
  if (side.speedup < side.speedup_low || side.speedup > side.speedup_high) return "speed-up out of its range";
  if (!near(side.share_of_bound, side.speedup / side.bound)) return "share of the bound";
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
  EXPECT_DOUBLE_EQ(result.cached_token_ratio, 2);
  EXPECT_DOUBLE_EQ(result.por, 0.5);
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
  EXPECT_EQ(whole.relative_speed, 1);
  EXPECT_EQ(baseline.speedup, 1);
  EXPECT_EQ(baseline.speedup_low, 1);
  EXPECT_EQ(baseline.speedup_high, 1);
  EXPECT_DOUBLE_EQ(baseline.bound, 1);
  EXPECT_DOUBLE_EQ(partition.bound, whole.bound);  // nothing is computed twice
  EXPECT_LT(packed.bound, whole.bound);
  EXPECT_LT(baseline.bound, packed.bound);
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
  EXPECT_EQ(broken([](SideResult& side) { side.err = 0.5; }), "ERR");
  EXPECT_EQ(broken([](SideResult& side) { side.seconds = NAN; }), "not finite or not positive");
  EXPECT_EQ(broken([](SideResult& side) { side.bound = 0.9; }), "bound below 1");
  EXPECT_EQ(broken([](SideResult& side) { side.speedup = 2 * side.speedup_high; }),
            "speed-up out of its range");
  EXPECT_EQ(broken([](SideResult& side) { side.share_of_bound *= 1.01; }), "share of the bound");
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
  ASSERT_EQ(result.append_only(), &merging);
  EXPECT_EQ(merging.encoded_tokens, 20);
  for (const SideResult& side : result.sides) {
    EXPECT_NEAR(side.loss, packing.loss, 1e-12 * packing.loss) << side.side.name;
    EXPECT_NEAR(side.grad_norm, packing.grad_norm, 1e-12 * packing.grad_norm) << side.side.name;
  }
  EXPECT_EQ(merging.speedup_over_append_only, 1);
  EXPECT_DOUBLE_EQ(merging.bound_over_append_only, 1);
  EXPECT_DOUBLE_EQ(packing.bound, 1);
  // What merging leaves to gain, and what it gains itself, make up the whole.
  EXPECT_GT(tree.bound_over_append_only, 1);
  EXPECT_GT(merging.bound, 1);
  EXPECT_DOUBLE_EQ(tree.bound_over_append_only * merging.bound, tree.bound);
}

TEST(Benchmark, WhereNothingCanBeMergedPackingIsWhatMergingLeaves) {
  const Trajectories trajectories = prompt_with_responses();
  const Forest forest = forest_of(trajectories, {});
  const auto sides = tree_and_packing_sides(forest, Strategy::kTreePacking, 0);
  ASSERT_EQ(sides.size(), 2U);
  const Decoder decoder = tiny_decoder(tiny_config(Family::kLlama, 31), 3, at::kFloat);
  const BenchmarkResult result = benchmark(decoder, trajectories, sides, {.repeats = 1});
  EXPECT_EQ(result.append_only_tokens, result.flat_tokens);
  EXPECT_EQ(result.append_only(), nullptr);
  EXPECT_EQ(result.sides[0].speedup_over_append_only, result.sides[0].speedup);
  EXPECT_DOUBLE_EQ(result.sides[0].bound_over_append_only, result.sides[0].bound);
}

nlohmann::json run_bench(std::vector<std::string> args) {
  const ScratchFolder scratch;
  write_tiny_model(scratch / "model", Family::kLlama, 64, 7, at::kFloat);
  args.insert(args.begin(), {"--model", scratch / "model", "--json", "--repeats", "1", "--warmup", "0"});
  cli::Command bench = cli::bench_command();
  cli::set_options(&bench, args);
  ::testing::internal::CaptureStdout();
  bench.run(bench.options);
  std::fflush(stdout);
  return nlohmann::json::parse(::testing::internal::GetCapturedStdout());
}

TEST(Benchmark, CommandWritesARowPerDataAndStrategy) {
  const nlohmann::json json = run_bench({"--strategies", "--ratios", "2,6", "--tree-tokens", "120"});
  std::set<std::pair<std::string, std::string>> seen;
  for (const auto& row : json["rows"]) {
    seen.emplace(row["data"], row["side"]);
    const std::string side = row["side"];
    SCOPED_TRACE(row.dump());
    for (const char* key :
         {"por", "err", "seconds", "speedup", "bound", "share_of_bound", "relative_speed"}) {
      EXPECT_TRUE(row[key].is_number()) << key;  // JSON has null for what is not finite
    }
    const double bound = row["bound"], whole_tree_bound = row["whole_tree_bound"];
    EXPECT_GE(bound, 1 - 1e-12);
    EXPECT_LE(bound, whole_tree_bound * (1 + 1e-12));
    const int64_t flat = row["flat_tokens"], tree = row["tree_tokens"], encoded = row["encoded_tokens"];
    if (side == "whole tree" || side == "partition") {
      EXPECT_EQ(encoded, tree);
    } else if (side == "tree packing") {
      EXPECT_TRUE(tree <= encoded && encoded <= flat) << encoded;
    } else {
      EXPECT_EQ(encoded, flat);
    }
  }
  EXPECT_EQ(json["rows"].size(), 8U);
  EXPECT_EQ(seen.size(), 8U);
}

TEST(Benchmark, CommandStillMeasuresOverRatios) {
  const nlohmann::json json = run_bench({"--ratios", "1,4", "--tree-tokens", "80", "--cpu-seconds"});
  ASSERT_EQ(json["rows"].size(), 2U);
  EXPECT_NEAR(json["rows"][0]["cached_token_ratio"].get<double>(), 1, 1e-12);
  EXPECT_NEAR(json["rows"][1]["cached_token_ratio"].get<double>(), 4, 0.1);
  EXPECT_NEAR(json["rows"][0]["bound"].get<double>(), 1, 1e-12);
  EXPECT_GT(json["rows"][1]["bound"].get<double>(), 1);
  for (const auto& row : json["rows"]) {
    EXPECT_EQ(row["append_only_measured"], false);
    EXPECT_EQ(row["bound_over_append_only"], row["bound"]);
    EXPECT_EQ(row["speedup_over_append_only"], row["speedup"]);
  }
}

}  // namespace
}  // namespace espalier::testing
