// SPDX-License-Identifier: Apache-2.0
// Costs of layers, and of models whose layers differ.
#include "espalier/plan/layer_cost.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "espalier/plan/memory_model.h"
#include "espalier/plan/time_model.h"

namespace espalier {
namespace {

const AttentionSpec kAttention{.num_attention_heads = 4, .num_key_value_heads = 2, .head_dim = 5};
const LayerSpec kNarrow{kAttention, DenseMlpSpec{.intermediate_size = 7}};
const LayerSpec kWide{AttentionSpec{.num_attention_heads = 8, .num_key_value_heads = 8, .head_dim = 6},
                      DenseMlpSpec{.intermediate_size = 31}};

const LayerSpec kRecurrent{GatedDeltaSpec{.linear_num_key_heads = 2,
                                          .linear_num_value_heads = 4,
                                          .linear_key_head_dim = 3,
                                          .linear_value_head_dim = 5,
                                          .linear_conv_kernel_dim = 4},
                           DenseMlpSpec{.intermediate_size = 7}};

const LayerSpec kStateSpace{
    SsmSpec{.num_heads = 4, .head_dim = 5, .state_size = 3, .n_groups = 2, .conv_kernel = 4}, NoMlp{}};

// Where the MLP is the widest.
const LayerSpec kLatent{LatentAttentionSpec{.num_attention_heads = 2,
                                            .q_lora_rank = 6,
                                            .kv_lora_rank = 5,
                                            .qk_nope_head_dim = 3,
                                            .qk_rope_head_dim = 4,
                                            .v_head_dim = 6,
                                            .softmax_scale = 1},
                        DenseMlpSpec{.intermediate_size = 31}};

ModelSpec model_of(std::vector<LayerSpec> layers) {
  return {.hidden_size = 10, .vocab_size = 11, .layers = std::move(layers)};
}

// Counted from the parameters, which have their sizes from elsewhere.
TEST(LayerCost, WeightsAreTheMatricesOfTheLayer) {
  LayerSpec gated = kNarrow;
  std::get<AttentionSpec>(gated.mixer).output_gate = true;
  LayerSpec fused = kNarrow;
  std::get<DenseMlpSpec>(fused.mlp).names.up = "";
  LayerSpec fused_queries = kNarrow;
  std::get<AttentionSpec>(fused_queries.mixer).fused = true;
  LayerSpec ungated{NoMixer(), kNarrow.mlp};
  std::get<DenseMlpSpec>(ungated.mlp).names.gate = "";
  LayerSpec latent = kLatent;
  std::get<LatentAttentionSpec>(latent.mixer).q_lora_rank = 0;
  for (const LayerSpec& layer :
       {kNarrow, kWide, gated, kRecurrent, kStateSpace, fused, fused_queries, ungated, kLatent, latent}) {
    int64_t weights = 0, widest = 0;
    for (const ParameterShape& parameter : layer_parameters(layer, 10)) {
      if (parameter.shape.size() != 2) continue;
      weights += parameter.shape[0] * parameter.shape[1];
      if (parameter.name.find("mlp.") != std::string::npos || parameter.name == "mixer.in_proj.weight" ||
          parameter.name == "self_attn.qkv_proj.weight")
        widest = std::max(widest, parameter.shape[0] * parameter.shape[1]);
    }
    EXPECT_EQ(layer_cost(layer, 10).weights, weights);
    EXPECT_EQ(layer_cost(layer, 10).max_weight_rows * 10, widest);
  }
}

// A token passes the router, its own experts and the shared ones; all of them are stored.
TEST(LayerCost, WeightsOfExpertsArePassedInPart) {
  const MoeSpec moe{
      .num_experts = 8, .num_experts_per_tok = 2, .moe_intermediate_size = 7, .shared_intermediate_size = 5};
  const LayerSpec layer{kAttention, moe};
  int64_t stored = 0, routed = 0;
  for (const ParameterShape& parameter : layer_parameters(layer, 10)) {
    if (parameter.shape.size() < 2) continue;
    stored += parameter.shape[0] * parameter.shape[1];
    if (parameter.name.starts_with("mlp.experts.")) routed += parameter.shape[0] * parameter.shape[1];
  }
  const LayerCost cost = layer_cost(layer, 10);
  EXPECT_EQ(cost.weights + cost.idle_weights, stored);
  EXPECT_EQ(cost.idle_weights * 4, routed * 3);  // six of eight
  const ModelCost model = model_cost(model_of({kNarrow, layer}));
  EXPECT_DOUBLE_EQ(model.stored_weights() - model.weights(), static_cast<double>(cost.idle_weights));
  // Gradient sums and upcast weights are those of all experts; FLOPs are not.
  MoeSpec more = moe;
  more.num_experts = 16;
  const Load load{.tokens = 100, .logit_rows = 100};
  const auto memory = [&](const MoeSpec& spec) {
    MemoryModel of{.cost = model_cost(model_of({kNarrow, {kAttention, spec}})), .num_parameters = 1000};
    of.element_bytes = 2;
    return std::pair(running_bytes(of, load, false), upcast_weight_bytes(of));
  };
  const double added = 8.0 * 3 * 10 * 7 + 8 * 10;
  EXPECT_GE(memory(more).first - memory(moe).first, added * 4 - 1);
  EXPECT_DOUBLE_EQ(memory(more).second - memory(moe).second, added * 4);
  const double flops = step_flops(model_cost(model_of({{kAttention, more}, kNarrow})), {100, 0, 100}).linear -
                       step_flops(model_cost(model_of({{kAttention, moe}, kNarrow})), {100, 0, 100}).linear;
  EXPECT_DOUBLE_EQ(flops, 6.0 * 100 * 8 * 10);  // the router's
}

// Experts in one tensor each, [experts, in, out]; the sums of gradients are those of biases and sinks as
// well.
TEST(LayerCost, BiasesCountWhereGradientsAreSummed) {
  const MoeSpec moe{.num_experts = 8,
                    .num_experts_per_tok = 2,
                    .moe_intermediate_size = 7,
                    .clamped_swiglu = ClampedSwiglu()};
  AttentionSpec attention = kAttention;
  attention.bias = attention.output_bias = attention.sinks = true;
  const LayerSpec clamped{attention, moe},
      dense{attention, DenseMlpSpec{.intermediate_size = 7, .bias = true}};
  AttentionSpec gated = attention;
  gated.output_gate = true;
  LayerSpec latent = kLatent, ungated{NoMixer(), dense.mlp};
  std::get<LatentAttentionSpec>(latent.mixer).bias = true;
  std::get<DenseMlpSpec>(ungated.mlp).names.gate = "";
  for (const LayerSpec& layer : {clamped, dense, LayerSpec{gated, moe}, kNarrow, latent, ungated}) {
    int64_t stored = 0, biases = 0;
    for (const ParameterShape& parameter : layer_parameters(layer, 10)) {
      if (parameter.name.ends_with("norm.weight")) continue;
      int64_t values = 1;
      for (const int64_t size : parameter.shape) values *= size;
      const bool is_bias = parameter.name.ends_with("bias") || parameter.name.ends_with("sinks");
      (is_bias ? biases : stored) += values;
    }
    const LayerCost cost = layer_cost(layer, 10);
    EXPECT_EQ(cost.weights + cost.idle_weights, stored);
    EXPECT_EQ(cost.biases, biases);
  }
  const auto running = [&](int64_t biases) {
    MemoryModel model{.cost = model_cost(model_of({kNarrow, clamped})), .num_parameters = 0};
    model.cost.layers[1].biases = biases;
    return running_bytes(model, {.tokens = 100, .logit_rows = 100}, false);
  };
  EXPECT_DOUBLE_EQ(running(500) - running(100), 400.0 * 4);
}

// Values are narrower than keys.
TEST(LayerCost, LatentAttention) {
  const LayerCost cost = layer_cost({kLatent.mixer, NoMlp()}, 10);
  EXPECT_EQ(cost.pair_elements, 2 * 7);
  EXPECT_EQ(cost.context_per_token, 2 * (7 + 6));
  EXPECT_EQ(cost.weights_after_mixer, 10 * 2 * 6);
  EXPECT_EQ(cost.max_weight_rows, 12);
  EXPECT_EQ(cost.position_tables, 4);
  EXPECT_EQ(cost.context_per_cut, 0);
}

TEST(LayerCost, ContextIsKeysAndValues) {
  EXPECT_EQ(layer_cost(kNarrow, 10).context_per_token, 2 * 2 * 5);
  EXPECT_EQ(layer_cost(kNarrow, 10).context_per_cut, 0);
}

TEST(LayerCost, RecurrentLayersLeaveStatesAndTails) {
  const LayerCost cost = layer_cost(kRecurrent, 10);
  EXPECT_EQ(cost.context_per_token, 0);
  EXPECT_EQ(cost.context_per_cut, 4 * 3 * 5 + 3 * (2 * 2 * 3 + 4 * 5));
  EXPECT_EQ(cost.pair_elements, 0);
  EXPECT_EQ(cost.position_tables, 0);
}

TEST(LayerCost, StateSpacesLeaveStatesAndTails) {
  const LayerCost cost = layer_cost(kStateSpace, 10);
  EXPECT_EQ(cost.context_per_token, 0);
  EXPECT_EQ(cost.context_per_cut, 4 * 3 * 5 + 3 * (4 * 5 + 2 * 2 * 3));
  EXPECT_EQ(cost.pair_elements, 0);
  EXPECT_EQ(cost.position_tables, 0);
  EXPECT_EQ(cost.weights_after_mixer, 10 * 4 * 5);  // the output projection is all that follows
  EXPECT_EQ(cost.kept_after_mixer.elements, 0);
}

TEST(LayerCost, AttentionWithoutRotationReadsNoTables) {
  LayerSpec plain = kNarrow;
  std::get<AttentionSpec>(plain.mixer).rotary = false;
  EXPECT_EQ(layer_cost(plain, 10).position_tables, 0);
  EXPECT_GT(layer_cost(kNarrow, 10).position_tables, 0);
}

TEST(LayerCost, RecurrencesCountPerToken) {
  for (const LayerSpec& layer : {kRecurrent, kStateSpace}) {
    const ModelCost model = model_cost(model_of({layer, kNarrow}));
    const Work work{.tokens = 100, .pairs = 0, .logit_rows = 100};
    const double linear = 100 * model.weights(), recurrence = 100 * model.recurrence();
    EXPECT_GT(recurrence, 0);
    EXPECT_DOUBLE_EQ(forward_flops(model, work).linear, 2 * linear + 2 * recurrence);
    EXPECT_DOUBLE_EQ(step_flops(model, work).linear, 6 * linear + 8 * recurrence);
    EXPECT_DOUBLE_EQ(layer_tokens(model, work), 2 * 100);
  }
}

TEST(LayerCost, NormsOfQueriesAndKeysKeepTheirInputs) {
  AttentionSpec with_norm = kAttention;
  with_norm.query_key_norm = true;
  const KeptPerToken plain = layer_cost({kAttention, DenseMlpSpec{7}}, 10).kept_by_mixer;
  const KeptPerToken normed = layer_cost({with_norm, DenseMlpSpec{7}}, 10).kept_by_mixer;
  EXPECT_EQ(normed.elements - plain.elements, 4 * 5 + 2 * 5);
  EXPECT_EQ(normed.statistics - plain.statistics, 4 + 2);
  with_norm.query_key_norm_over_heads = true;
  const KeptPerToken over_heads = layer_cost({with_norm, DenseMlpSpec{7}}, 10).kept_by_mixer;
  EXPECT_EQ(over_heads.elements, normed.elements);
  EXPECT_EQ(over_heads.statistics - plain.statistics, 2);
}

// FLOPs add up over layers, wherever each stands; only the last one leaves rows out.
TEST(LayerCost, FlopsOfLayersThatDiffer) {
  const Work work{.tokens = 100, .pairs = 1000, .logit_rows = 100}, few_rows{100, 1000, 10};
  const auto flops = [](std::vector<LayerSpec> layers, const Work& of) {
    return step_flops(model_cost(model_of(std::move(layers))), of);
  };
  const FlopCount mixed = flops({kNarrow, kWide, kNarrow}, work);
  EXPECT_DOUBLE_EQ(mixed.linear, 2 * flops({kNarrow}, work).linear + flops({kWide}, work).linear);
  EXPECT_DOUBLE_EQ(mixed.attention, 2 * flops({kNarrow}, work).attention + flops({kWide}, work).attention);
  EXPECT_DOUBLE_EQ(mixed.head, flops({kWide}, work).head);
  const double left_out = 6.0 * 90 * static_cast<double>(layer_cost(kWide, 10).weights_after_mixer);
  EXPECT_DOUBLE_EQ(flops({kNarrow, kWide}, few_rows).linear, flops({kWide, kNarrow}, work).linear - left_out);
}

// Layers with windows count the pairs of their window.
TEST(LayerCost, PairsOfSlidingWindows) {
  const auto with_window = [](int64_t window) {
    LayerSpec layer = kNarrow;
    std::get<AttentionSpec>(layer.mixer).sliding_window = window;
    return layer;
  };
  const ModelCost model = model_cost(model_of({kNarrow, with_window(30), with_window(8), with_window(30)}));
  EXPECT_EQ(model.sliding_windows(), (std::vector<int64_t>{8, 30}));
  const Work work{.tokens = 100, .pairs = 1000, .logit_rows = 100, .window_pairs = {300, 700}};
  EXPECT_DOUBLE_EQ(step_flops(model, work).attention, 14.0 * 4 * 5 * (1000 + 2 * 700 + 300));
  const Load load{.tokens = 100, .pairs = 1000, .window_pairs = {300, 700}};
  EXPECT_DOUBLE_EQ(time_features(model, load)[3], 1000 + 2 * 700 + 300);
  EXPECT_DOUBLE_EQ(step_flops(model, Work{.tokens = 5}).attention, 0);
}

TEST(LayerCost, TimeOfLayersThatDiffer) {
  const Load load{.tokens = 100, .pairs = 1000, .logit_rows = 100};
  // Every rate but that of linear maps is 0. Then time is in proportion to weights.
  const auto seconds = [&](std::vector<LayerSpec> layers, double of_layer_token) {
    return predicted_seconds({model_cost(model_of(std::move(layers))), {0, 0, of_layer_token, 0, 0, 0}}, load,
                             CheckpointActivations::kNone);
  };
  const double narrow = static_cast<double>(layer_cost(kNarrow, 10).weights),
               wide = static_cast<double>(layer_cost(kWide, 10).weights);
  EXPECT_DOUBLE_EQ(seconds({kNarrow, kWide, kWide}, narrow + 2 * wide),
                   3 * (seconds({kNarrow}, narrow) + 2 * seconds({kWide}, wide)));
  EXPECT_EQ(time_features(model_cost(model_of({kNarrow, kWide})), load)[3], 2 * 1000);
}

MemoryModel memory_of(std::vector<LayerSpec> layers, CheckpointActivations checkpoint_activations) {
  return {.cost = model_cost(model_of(std::move(layers))),
          .num_parameters = 1000,
          .checkpoint_activations = checkpoint_activations};
}

TEST(LayerCost, MemoryOfLayersThatDiffer) {
  const Load load{.tokens = 1000, .logit_rows = 10};
  for (const auto activations : {CheckpointActivations::kNone, CheckpointActivations::kLayer}) {
    const auto held = [&](std::vector<LayerSpec> layers) {
      return held_bytes(memory_of(std::move(layers), activations), load);
    };
    const auto running = [&](std::vector<LayerSpec> layers) {
      return running_bytes(memory_of(std::move(layers), activations), load, true);
    };
    // Layers add up. Position tables are those of the largest layer in all four.
    const double of_narrow = held({kNarrow, kWide, kNarrow}) - held({kWide, kNarrow});
    EXPECT_DOUBLE_EQ(held({kNarrow, kWide, kNarrow, kNarrow}), held({kWide, kNarrow}) + 2 * of_narrow);
    EXPECT_GT(held({kWide, kWide, kNarrow}) - held({kWide, kNarrow}),
              activations == CheckpointActivations::kNone ? of_narrow : of_narrow - 1);
    // The layer that needs most decides, wherever it stands.
    EXPECT_GT(running({kNarrow, kWide, kNarrow}), running({kNarrow, kNarrow, kNarrow}));
    EXPECT_LE(running({kNarrow, kWide, kNarrow}), running({kWide, kWide, kWide}));
  }
}

// A layer whose context is the state at a cut, as a recurrence has it, next to one of attention.
TEST(LayerCost, ContextPerCutIsKeptOnceForEveryCut) {
  MemoryModel model = memory_of({kNarrow, kNarrow}, CheckpointActivations::kPiece);
  model.element_bytes = model.operand_bytes = 2;
  const Load load{.tokens = 100, .cuts = 3};
  const double without = held_bytes(model, load);
  model.cost.layers[1].context_per_cut = 50;
  // Three states in float32 and their gradients.
  EXPECT_DOUBLE_EQ(held_bytes(model, load) - without, 2 * 3 * 50 * 4);
  Load more = load;
  more.cuts = 4;
  EXPECT_DOUBLE_EQ(held_bytes(model, more) - held_bytes(model, load), 2 * 50 * 4);
  // The leaf below has the gradients of the layer with most beside what its parent holds.
  const Load leaf{.tokens = 1, .parent = 0};
  const auto rise = [&](int64_t cuts) {
    Load parent = load;
    parent.cuts = cuts;
    return peak_bytes(model, std::vector<Load>{parent, leaf})[1];
  };
  EXPECT_DOUBLE_EQ(rise(4) - rise(3), (2 + 1) * 50 * 4);
}

TEST(LayerCost, CutsAreRunsThatOthersContinue) {
  MicroBatch top, left, right, below;
  top.runs = {{0, 3, -1}, {3, 5, 0}, {5, 6, 0}};
  left.runs = {{6, 7, -1}, {7, 8, -1}};
  left.context_runs = {0, 1};
  right.runs = {{8, 9, -1}};
  right.context_runs = {1};  // a run that `left` continues as well
  below.runs = {{9, 10, -1}};
  below.context_runs = {0};
  left.parent = right.parent = 0;
  below.parent = 1;
  const std::vector<MicroBatch> plan{top, left, below, right};
  std::vector<Load> loads = loads_of(plan);
  const auto cuts = [&] {
    std::vector<int64_t> result;
    for (const Load& load : loads) result.push_back(load.cuts);
    return result;
  };
  EXPECT_EQ(cuts(), (std::vector<int64_t>{2, 1, 0, 0}));
  count_cuts(plan, {true, false, false, true}, &loads);
  EXPECT_EQ(cuts(), (std::vector<int64_t>{1, 0, 0, 0}));
}

}  // namespace
}  // namespace espalier
