// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/cost.h"

#include <gtest/gtest.h>

#include "espalier/train/optimizer/optimizer.h"
#include "tests/engine/tiny_models.h"

namespace espalier::testing {
namespace {

void expect_work(const Work& work, int64_t tokens, int64_t pairs, int64_t logit_rows) {
  EXPECT_EQ(work.tokens, tokens);
  EXPECT_EQ(work.pairs, pairs);
  EXPECT_EQ(work.logit_rows, logit_rows);
}

Work plan_work(const Step& step) {
  return work_of(step_loads(step));
}

Work flat_work(const Step& step) {
  return espalier::flat_work(step.forest, loss_positions(step));
}

Work append_only_work(const Step& step) {
  return espalier::append_only_work(step.forest, loss_positions(step));
}

Step step_of(const Trajectories& trajectories, const PlanOptions& plan = {}) {
  return make_step(trajectories, all_rows(trajectories), {.plan = plan});
}

TEST(Cost, WorkOfATreeByHand) {
  // [1 2 3] - [4 5], [6]; the third row ends inside the tree, the fourth is a duplicate.
  const Trajectories trajectories = from_rows({{1, 2, 3, 4, 5}, {1, 2, 3, 6}, {1, 2, 3}, {1, 2, 3, 6}});
  const Step step = step_of(trajectories);
  // Pairs: 1 + 2 + 3 + 4 + 5 along the first path, 4 for token 6. Predicting tokens: 1, 2, 3, 4.
  expect_work(plan_work(step), 6, 19, 4);
  expect_work(flat_work(step), 5 + 4 + 3 + 4, 15 + 10 + 6 + 10, 4 + 3 + 2 + 3);
  // Append-only merging keeps one sequence per leaf; a merged row's targets stand in the first leaf below it.
  expect_work(append_only_work(step), 5 + 4, 15 + 10, 4 + 3);
}

TEST(Cost, OnlyTargetsWithLossReachTheHead) {
  TrajectoriesBuilder builder;
  builder.append({.input_ids = {1, 2, 3, 4}, .loss_mask = {1, 0, 0, 1}});
  builder.append({.input_ids = {1, 2, 5}, .loss_mask = {0, 1, 1}});
  builder.append({.input_ids = {1, 2}, .loss_mask = {0, 1}});
  const Trajectories trajectories = builder.finish();
  const Step step = step_of(trajectories);
  expect_work(plan_work(step), 5, 1 + 2 + 3 + 4 + 3, 3);  // 1 -> 2, 2 -> 5, 3 -> 4
  expect_work(flat_work(step), 9, 10 + 6 + 3, 1 + 2 + 1);
  // The row [1 2] is merged into the first leaf below it, where its target joins the row's own.
  expect_work(append_only_work(step), 7, 10 + 6, 2 + 2);
}

TEST(Cost, PlanWorkCountsRepeatedPrefixesAndSkipsPiecesWithoutLoss) {
  TrajectoriesBuilder builder;
  builder.append({.input_ids = {1, 2, 3, 4}});
  builder.append({.input_ids = {1, 2, 5, 6}});
  builder.append({.input_ids = {9, 9, 9, 9}, .loss_mask = {0, 0, 0, 0}});
  const Trajectories trajectories = builder.finish();
  expect_work(plan_work(step_of(trajectories, {Strategy::kTreePacking, 4})), 8, 20, 6);
  expect_work(plan_work(step_of(trajectories, {Strategy::kSequencePacking, 4})), 8, 20, 6);
  expect_work(plan_work(step_of(trajectories, {Strategy::kTreePacking, 6})), 6, 10 + 7, 4);
}

TEST(Cost, SpeedupBoundIsTheRatioOfFlops) {
  const Trajectories trajectories = from_rows({{1, 2, 3, 4, 5}, {1, 2, 3, 6}, {1, 2, 3}, {1, 2, 3, 6}});
  const ModelCost model = model_cost(
      {.hidden_size = 1,
       .vocab_size = 1,
       .layers = {{AttentionSpec{.num_attention_heads = 1, .num_key_value_heads = 1, .head_dim = 1},
                   DenseMlpSpec{.intermediate_size = 1}}}});
  // Per token 6 * 3 for q, k and v, per pair 14, per logit row 6 * (1 + 3) for what comes after attention
  // and 8.
  const double flat = 18.0 * 16 + 14 * 41 + 32 * 12, tree = 18.0 * 6 + 14 * 19 + 32 * 4;
  const auto bound = [&](const Step& step) {
    const LossFlops flops = loss_flops(model, step);
    return flops.sequence_packing / flops.plan;
  };
  EXPECT_DOUBLE_EQ(bound(step_of(trajectories)), flat / tree);
  EXPECT_DOUBLE_EQ(bound(step_of(trajectories, {Strategy::kSequencePacking, 0})), 1);
  EXPECT_DOUBLE_EQ(bound(step_of(from_rows({{1, 2}, {3, 4, 5}}))), 1);
}

TEST(Cost, PlansArePricedWithTheTermsThatTheyMayHave) {
  // Terms are most of the memory.
  std::vector<std::vector<int32_t>> rows(5000, {1, 2, 3, 4, 5, 6});
  rows.push_back({1, 2, 3, 7});
  const Trajectories trajectories = from_rows(rows);
  const DecoderConfig config = tiny_config(Family::kLlama, 19);
  const PlanCosts costs{assumed_time_model(model_cost(config)),
                        memory_model(config, at::kFloat, *make_objective({.kind = ObjectiveKind::kGrpo}))};
  for (const Strategy strategy :
       {Strategy::kPartition, Strategy::kTreePacking, Strategy::kAppendOnly, Strategy::kSequencePacking}) {
    for (const int64_t token_budget : {0, 6}) {
      const Step step = make_step(trajectories, all_rows(trajectories),
                                  {.plan = {strategy, token_budget}, .costs = &costs});
      const double share = predict_step(costs, step).largest_peak_bytes() / price(costs, step.plan).bytes;
      EXPECT_LE(share, 1);
      EXPECT_GE(share, 0.75);  // the first token of a row has no term
    }
  }
}

// Every rate but one is 0. Then the pass takes the forward share of that rate's work.
TEST(Cost, ALogprobPassIsPriced) {
  const Step step = step_of(from_rows({{1, 2, 3, 4, 5}, {1, 2, 3, 6}}), {Strategy::kPartition, 3});
  const DecoderConfig config = tiny_config(Family::kLlama, 19);
  PlanCosts costs{assumed_time_model(model_cost(config)),
                  memory_model(config, at::kFloat, *make_objective({}))};
  const double shares[kNumTimeFeatures] = {1.0 / 3, 1.0 / 3, 2.0 / 6, 4.0 / 14, 3.0 / 8, 2.0 / 8};
  for (int i = 0; i < kNumTimeFeatures; ++i) {
    costs.time.seconds = {};
    costs.time.seconds[i] = 0.5;
    const StepPrediction plain = predict_step(costs, step), with_pass = predict_step(costs, step, true);
    EXPECT_EQ(plain.logprob_pass_seconds, 0);
    EXPECT_NEAR(with_pass.logprob_pass_seconds, shares[i] * plain.total_seconds(), 1e-12) << i;
    EXPECT_DOUBLE_EQ(with_pass.total_seconds(), plain.total_seconds() + with_pass.logprob_pass_seconds);
    EXPECT_GT(with_pass.logprob_pass_seconds, 0);
  }
}

TEST(Cost, ResidentBytesByHand) {
  const DecoderConfig config = tiny_config(Family::kLlama, 19);
  double parameters = 0;
  const Decoder decoder = tiny_decoder(config, 1);
  for (const Parameter& parameter : decoder.parameters()) {
    parameters += static_cast<double>(parameter.value.numel());
  }
  const auto resident = [&](at::ScalarType dtype, int64_t optimizer_bytes) {
    MemoryModel memory = memory_model(config, dtype, *make_objective({}));
    memory.optimizer_bytes_per_parameter = optimizer_bytes;
    return resident_bytes(memory) / parameters;
  };
  // Weights, gradient sums in float32 at least, two moments, and a master where weights are bfloat16.
  EXPECT_EQ(resident(at::kDouble, optimizer_bytes(OptimizerKind::kAdamW, at::kDouble)), 8 + 8 + 16);
  EXPECT_EQ(resident(at::kFloat, optimizer_bytes(OptimizerKind::kSgd, at::kFloat)), 4 + 4);
  EXPECT_EQ(resident(at::kFloat, 0), 4 + 4);
  EXPECT_EQ(resident(at::kBFloat16, optimizer_bytes(OptimizerKind::kAdamW, at::kBFloat16)), 2 + 4 + 12);
}

TEST(Cost, LogitsTakeTheBlocksOfTheDevice) {
  DecoderConfig config = tiny_config(Family::kLlama, 19);
  config.vocab_size = 1 << 18;
  constexpr int64_t kRows = 1 << 12;  // 4 GiB of float32 logits
  const auto head_bytes = [&](at::ScalarType dtype, at::Device device) {
    const MemoryModel model = memory_model(config, dtype, *make_objective({}), device);
    const Load with_head{.tokens = kRows, .pairs = kRows, .logit_rows = kRows},
        without{.tokens = kRows, .pairs = kRows};
    return running_bytes(model, with_head, true) - running_bytes(model, without, true);
  };
  const double mebibyte = 1 << 20;
  EXPECT_NEAR(head_bytes(at::kFloat, at::kCPU), 2 * 16 * mebibyte, 8 * mebibyte);
  EXPECT_NEAR(head_bytes(at::kFloat, at::kCUDA), 2 * 512 * mebibyte, 128 * mebibyte);
  EXPECT_NEAR(head_bytes(at::kBFloat16, at::kCUDA), 512 * mebibyte, 128 * mebibyte);
}

}  // namespace
}  // namespace espalier::testing
