// SPDX-License-Identifier: Apache-2.0
// Predicted memory against what tensors really took.
#include "espalier/runtime/tensor_memory.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "espalier/base/check.h"
#include "espalier/engine/cost.h"
#include "espalier/engine/engine.h"
#include "espalier/plan/planner.h"
#include "espalier/tree/synth.h"
#include "tests/engine/tiny_models.h"
#include "tests/ops/threads.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

TEST(TensorMemory, CountsWhatIsHeldAndItsPeak) {
  count_tensor_memory();
  const int64_t before = tensor_memory();
  reset_peak_tensor_memory();
  {
    const at::Tensor first = at::empty({1000}, at::kDouble);
    EXPECT_GE(tensor_memory() - before, 8000);
    EXPECT_LE(tensor_memory() - before, 8200);
    {
      const at::Tensor second = at::zeros({500}, at::kDouble);
    }
    EXPECT_GE(peak_tensor_memory() - before, 12000);
    EXPECT_LE(tensor_memory() - before, 8200);
  }
  EXPECT_EQ(tensor_memory(), before);
  EXPECT_GE(peak_tensor_memory() - before, 12000);
  reset_peak_tensor_memory();
  EXPECT_EQ(peak_tensor_memory(), before);
}

// Large enough that activations are most of the memory.
DecoderConfig measured_config(Family family) {
  DecoderConfig config = tiny_config(family, 31);
  config.hidden_size = 32;
  config.layers.resize(4, config.layers.front());
  for (LayerSpec& layer : config.layers) {
    if (auto* mlp = std::get_if<DenseMlpSpec>(&layer.mlp)) mlp->intermediate_size = 88;
  }
  config.max_position_embeddings = 1 << 17;
  return config;
}

// With loss on the last tokens of every row.
Trajectories as_trajectories(Csr<int32_t> sequences, int64_t with_loss) {
  Trajectories trajectories;
  std::vector<uint8_t> mask(sequences.values.size());
  for (int64_t r = 0; r < sequences.num_rows(); ++r) {
    const int64_t end = sequences.offsets[r + 1];
    std::fill(mask.begin() + std::max(sequences.offsets[r], end - with_loss), mask.begin() + end, 1);
  }
  trajectories.loss_weights = Column<uint8_t>(std::move(mask));
  trajectories.offsets = Column<int64_t>(std::move(sequences.offsets));
  trajectories.input_ids = Column<int32_t>(std::move(sequences.values));
  return trajectories;
}

struct Shares {
  double share;  // measured peak / predicted
  int64_t micro_batches;
};

Shares run(const Trajectories& trajectories, const DecoderConfig& config, const PlanOptions& options,
           at::ScalarType dtype = at::kFloat, const ObjectiveOptions& objective = {},
           const std::optional<LoraOptions>& lora = {}) {
  // The work space of more threads is not predicted, and is much beside budgets as small as these.
  const Threads one(1);
  count_tensor_memory();
  const int64_t before = tensor_memory();
  Decoder decoder = tiny_decoder(config, 1, dtype);
  const int64_t weights = tensor_memory() - before;
  PlanCosts costs{
      assumed_time_model(model_cost(config)),
      memory_model(config, dtype, *make_objective(objective), at::kCPU, head_demand(trajectories))};
  if (lora) {
    const ModelSpec& spec = config;
    const at::ScalarType of_adapters = dtype == at::kDouble ? dtype : at::kFloat;
    costs = with_adapters(std::move(costs), spec, *lora);
    decoder = Decoder(config, decoder.weights(), decoder.buffers(),
                      random_adapter(adapted_maps(spec, lora->targets), *lora, 2, of_adapters));
  }
  const Step step = make_step(trajectories, all_rows(trajectories),
                              {.plan = options, .objective = objective, .costs = &costs});
  decoder.zero_gradients();
  forward_backward(decoder, step, Loss(trajectories, objective));  // allocates the sums
  const StepResult result = forward_backward(decoder, step, Loss(trajectories, objective));
  const double predicted = predict_step(costs, step).largest_peak_bytes();
  // Weights are counted with what allocators round up: thousands of small tensors are no model.
  const double rounding = static_cast<double>(weights) -
                          static_cast<double>(costs.memory.num_parameters * costs.memory.element_bytes);
  EXPECT_GE(rounding, 0);
  return {static_cast<double>(result.measured_peak_bytes() - before) / predicted,
          static_cast<int64_t>(result.measured.size())};
}

void expect_bounded(const char* name, const Trajectories& trajectories, const DecoderConfig& config,
                    int64_t part, double least_share) {
  const int64_t tokens = forest_of(trajectories, {}).tree_tokens();
  for (const CheckpointActivations checkpoint :
       {CheckpointActivations::kNone, CheckpointActivations::kLayer, CheckpointActivations::kPiece}) {
    SCOPED_TRACE(fmt::format("{}, budget a {}th of {} tokens, checkpoint {}", name, part, tokens,
                             espalier::to_string(checkpoint)));
    const Shares shares = run(trajectories, config, {Strategy::kPartition, tokens / part, checkpoint});
    std::printf("%-28s 1/%-3lld %-6s %4lld micro-batches: measured / predicted peak %.3f\n", name,
                static_cast<long long>(part), espalier::to_string(checkpoint),
                static_cast<long long>(shares.micro_batches), shares.share);
    EXPECT_LE(shares.share, 1.10);
    EXPECT_GE(shares.share, least_share);  // a bound that is never near holds nothing
    EXPECT_GE(shares.micro_batches, part * 3 / 4);
  }
}

TEST(TensorMemory, PeakOfPartitionsIsBoundedByThePlan) {
  const Trajectories tree = as_trajectories(synthesize({.depth = 6,
                                                        .branching = 3,
                                                        .node_length = 10,
                                                        .vocab_size = 31,
                                                        .end_inside = 0.1,
                                                        .seed = test_seed(5)}),
                                            30);
  for (const int64_t part : {4, 16, 64}) {
    // With norms of q and k at one of the sizes.
    const Family family = part == 16 ? Family::kQwen3 : Family::kLlama;
    expect_bounded("agent tree", tree, measured_config(family), part, 0.6);
  }
}

TEST(TensorMemory, PeakOfAChainOfAThousandNodes) {
  // One trajectory per turn, each going on from the one before.
  Csr<int32_t> rows;
  std::vector<int32_t> ids{1};
  Rng rng(test_seed(3));
  for (int turn = 0; turn < 1000; ++turn) {
    for (int i = 0; i < 4; ++i) ids.push_back(static_cast<int32_t>(rng.below(31)));
    rows.push_row(ids);
  }
  const Trajectories chain = as_trajectories(std::move(rows), 4);
  for (const int64_t part : {4, 64}) {
    expect_bounded("chain of 1,000 nodes", chain, measured_config(Family::kLlama), part, 0.6);
  }
}

TEST(TensorMemory, PeakOfAStarOfTenThousandLeaves) {
  Csr<int32_t> rows;
  Rng rng(test_seed(4));
  std::vector<int32_t> prompt;
  for (int i = 0; i < 200; ++i) prompt.push_back(static_cast<int32_t>(rng.below(31)));
  for (int leaf = 0; leaf < 10'000; ++leaf) {
    std::vector<int32_t> ids = prompt;
    // Leaves differ from the start in three digits of base 31.
    for (int digit = leaf, i = 0; i < 3; ++i, digit /= 31) ids.push_back(digit % 31);
    rows.push_row(ids);
  }
  const Trajectories star = as_trajectories(std::move(rows), 3);
  for (const int64_t part : {4, 64}) {
    expect_bounded("star of 10,000 leaves", star, measured_config(Family::kLlama), part, 0.4);
  }
}

// A few tokens with very many loss terms.
TEST(TensorMemory, PeakOfLossTermsIsThatOfTheObjective) {
  TrajectoriesBuilder builder;
  for (int row = 0; row < 20'000; ++row) {
    TrajectoryRow built{.input_ids = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, row % 2 == 0 ? 11 : 12},
                        .advantage = row % 3 - 1.0};
    if (row % 4 != 0) {
      built.logprobs.assign(built.input_ids.size(), -3.0);
      built.logprobs[0] = 0;
    }
    builder.append(built);
  }
  const Trajectories trajectories = builder.finish();
  for (const ObjectiveKind kind : {ObjectiveKind::kSft, ObjectiveKind::kGrpo}) {
    // In one micro-batch, and in three of which two wait for the last.
    for (const int64_t token_budget : {12, 4}) {
      for (const CheckpointActivations checkpoint :
           {CheckpointActivations::kNone, CheckpointActivations::kPiece}) {
        ObjectiveOptions objective;
        objective.kind = kind;
        const PlanOptions options{Strategy::kPartition, token_budget, checkpoint};
        const Shares shares =
            run(trajectories, tiny_config(Family::kLlama, 31), options, at::kFloat, objective);
        std::printf("%s, %lld tokens, %s: measured / predicted peak %.3f\n",
                    kind == ObjectiveKind::kSft ? "sft" : "grpo", static_cast<long long>(token_budget),
                    espalier::to_string(checkpoint), shares.share);
        EXPECT_LE(shares.share, 1.02);
        EXPECT_GE(shares.share, 0.9);
        EXPECT_EQ(shares.micro_batches, token_budget == 12 ? 1 : 3);
      }
    }
  }
}

// The same with five tokens of a teacher for each term.
TEST(TensorMemory, PeakOfATeachersTokensIsBoundedByTheObjective) {
  TrajectoriesBuilder builder;
  constexpr int32_t kTopk = 5;
  for (int row = 0; row < 10'000; ++row) {
    TrajectoryRow built{.input_ids = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, row % 2 == 0 ? 11 : 12}};
    for (size_t token = 0; token < built.input_ids.size(); ++token) {
      for (int32_t k = 0; k < kTopk; ++k) {
        built.ref_topk_ids.push_back(token == 0 ? -1 : (row + 3 * k) % 31);
        built.ref_topk_logprobs.push_back(token == 0 ? 0 : -2.5);
      }
    }
    builder.append(built);
  }
  const Trajectories trajectories = builder.finish();
  for (const RefTopk ref_topk : {RefTopk::kRest, RefTopk::kRenormalize}) {
    for (const int64_t token_budget : {12, 4}) {
      const ObjectiveOptions objective{.kind = ObjectiveKind::kOpd, .ref_topk = ref_topk};
      const Shares shares = run(trajectories, tiny_config(Family::kLlama, 31),
                                {Strategy::kPartition, token_budget}, at::kFloat, objective);
      std::printf("opd %s, %lld tokens: measured / predicted peak %.3f\n",
                  std::string(to_string(ref_topk)).c_str(), static_cast<long long>(token_budget),
                  shares.share);
      EXPECT_LE(shares.share, 1.02);
      // Few edges are shared by very many terms here; the model counts each term's by itself.
      EXPECT_GE(shares.share, 0.5);
    }
  }
}

// Entropies and softcapped logits are computed with the head in float32, and its gradient beside the sum.
TEST(TensorMemory, EntropiesAndSoftcapsUpcastTheHead) {
  DecoderConfig config = tiny_config(Family::kLlama, 20'000);
  config.hidden_size = 32;
  const Trajectories tree = as_trajectories(
      synthesize({.depth = 3, .branching = 2, .node_length = 3, .vocab_size = 31, .seed = test_seed(8)}), 4);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const bool entropies : {true, false}) {
      config.final_logit_softcapping = entropies ? 0 : 2;
      const ObjectiveOptions objective{.entropy_coef = entropies ? 0.1 : 0};
      const Shares shares = run(tree, config, {Strategy::kPartition, 600}, dtype, objective);
      std::printf("%s in %s: measured / predicted peak %.3f\n", entropies ? "entropies" : "softcap",
                  c10::toString(dtype), shares.share);
      EXPECT_LE(shares.share, 1.05) << dtype << ", entropies: " << entropies;
      EXPECT_GE(shares.share, 0.7) << dtype << ", entropies: " << entropies;
    }
  }
}

TEST(TensorMemory, LowerPrecisionAndPackingAreBoundedToo) {
  const Trajectories tree = as_trajectories(
      synthesize({.depth = 4, .branching = 3, .node_length = 40, .vocab_size = 31, .seed = test_seed(6)}),
      1000);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const Strategy strategy :
         {Strategy::kPartition, Strategy::kTreePacking, Strategy::kAppendOnly, Strategy::kSequencePacking}) {
      const Shares shares = run(tree, measured_config(Family::kQwen2), {strategy, 600}, dtype);
      std::printf("%s %s: measured / predicted peak %.3f\n", c10::toString(dtype),
                  espalier::to_string(strategy), shares.share);
      EXPECT_LE(shares.share, 1.10) << dtype << espalier::to_string(strategy);
    }
  }
}

// Frozen weights have no gradients, and fewer activations are kept.
TEST(TensorMemory, AdaptersAreBoundedToo) {
  const Trajectories tree = as_trajectories(
      synthesize({.depth = 4, .branching = 3, .node_length = 40, .vocab_size = 31, .seed = test_seed(7)}),
      1000);
  const std::vector<std::string> targets[] = {{"q_proj", "v_proj"}, {kAllLinear}};
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const CheckpointActivations checkpoint :
         {CheckpointActivations::kNone, CheckpointActivations::kLayer, CheckpointActivations::kPiece}) {
      for (const auto& names : targets) {
        const LoraOptions lora{.rank = 2, .alpha = 2, .targets = names};
        const Shares shares = run(tree, measured_config(Family::kLlama),
                                  {Strategy::kPartition, 600, checkpoint}, dtype, {}, lora);
        std::printf("%s %s %s: measured / predicted peak %.3f\n", c10::toString(dtype),
                    espalier::to_string(checkpoint), names.front().c_str(), shares.share);
        EXPECT_LE(shares.share, 1.10) << dtype << espalier::to_string(checkpoint) << names.front();
        EXPECT_GE(shares.share, 0.75) << dtype << espalier::to_string(checkpoint) << names.front();
      }
    }
  }
}

// A vocabulary that makes the head most of the memory, and few logits.
TEST(TensorMemory, AdaptersOfTheHeadAreBoundedToo) {
  DecoderConfig config = tiny_config(Family::kLlama, 20'000);
  config.hidden_size = 32;
  const Trajectories tree = as_trajectories(
      synthesize({.depth = 3, .branching = 2, .node_length = 3, .vocab_size = 31, .seed = test_seed(8)}), 4);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const char* kind : {"plain", "entropies", "softcap"}) {
      config.final_logit_softcapping = kind == std::string("softcap") ? 2 : 0;
      const ObjectiveOptions objective{.entropy_coef = kind == std::string("entropies") ? 0.1 : 0};
      const LoraOptions lora{.rank = 8, .alpha = 2, .targets = {kAllLinear, "lm_head"}};
      const Shares shares = run(tree, config, {}, dtype, objective, lora);
      std::printf("%s in %s: measured / predicted peak %.3f\n", kind, c10::toString(dtype), shares.share);
      EXPECT_LE(shares.share, 1.10) << kind << " " << dtype;
      EXPECT_GE(shares.share, 0.6) << kind << " " << dtype;
    }
  }
}

}  // namespace
}  // namespace espalier::testing
