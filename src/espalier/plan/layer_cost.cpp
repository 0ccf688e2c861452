// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/layer_cost.h"

#include <algorithm>
#include <set>
#include <variant>

#include "espalier/base/check.h"

namespace espalier {
namespace {

// Saved: the layer's input and its norm's output; q, k, v and the attention output; with norms of q and k
// also q and k before the norms; the factors of norms and the log-sum-exps.
void add_mixer(const AttentionSpec& attention, int64_t hidden, LayerCost* cost) {
  const int64_t query = attention.num_attention_heads * attention.head_dim;
  const int64_t key = attention.num_key_value_heads * attention.head_dim;
  const int64_t gate = attention.output_gate ? query : 0;
  cost->weights += hidden * (2 * query + 2 * key + gate);
  cost->weights_after_mixer += hidden * query;
  if (attention.fused) cost->max_weight_rows = query + 2 * key;
  if (attention.bias) cost->biases += query + gate + 2 * key;
  if (attention.output_bias) cost->biases += hidden;
  if (attention.sinks) cost->biases += attention.num_attention_heads;
  cost->pair_elements = query;
  cost->sliding_window = attention.sliding_window;
  cost->kept_by_mixer = {.elements = 2 * hidden + 2 * query + 2 * key,
                         .statistics = 1 + attention.num_attention_heads};
  if (attention.query_key_norm) {
    cost->kept_by_mixer.elements += query + key;
    cost->kept_by_mixer.statistics += attention.query_key_norm_over_heads
                                          ? 2
                                          : attention.num_attention_heads + attention.num_key_value_heads;
  }
  // The gate, its sigmoid, and the output before gating.
  cost->kept_by_mixer.elements += 3 * gate;
  cost->mixer_output = query;
  cost->mixer_gradients = 2 * query + 4 * key + 2 * gate;
  if (attention.rotary)
    cost->position_tables = attention.rotary_dim > 0 ? attention.rotary_dim : attention.head_dim;
  cost->context_per_token = 2 * key;
}

// Saved: the layer's input and its norm's output; the projections of low rank and their norms; q, k, v and
// the attention output; the factors of norms and the log-sum-exps.
void add_mixer(const LatentAttentionSpec& attention, int64_t hidden, LayerCost* cost) {
  const int64_t query = attention.query_size(), value = attention.value_size();
  const int64_t rank = attention.q_lora_rank, latent = attention.kv_lora_rank;
  const int64_t rotated = attention.qk_rope_head_dim;
  const int64_t key_and_value = attention.num_attention_heads * attention.qk_nope_head_dim + value;
  cost->weights += rank > 0 ? rank * (hidden + query) : hidden * query;
  cost->weights += hidden * (latent + rotated + value) + latent * key_and_value;
  cost->weights_after_mixer += hidden * value;
  cost->max_weight_rows = std::max({rank > 0 ? rank : query, latent + rotated, value});
  if (attention.bias) cost->biases += rank + latent + rotated + hidden;
  cost->pair_elements = query;
  cost->kept_by_mixer = {.elements = 2 * hidden + 2 * rank + 2 * latent + 2 * query + 2 * value,
                         .statistics = 3 + attention.num_attention_heads};
  cost->mixer_output = value;
  cost->mixer_gradients = 4 * query + 2 * value + 2 * key_and_value;
  cost->position_tables = rotated;
  cost->context_per_token = query + value;
}

// Tokens per chunk of a linear recurrence (ops/chunk_scan).
constexpr int64_t kChunkTokens = 64;

// Saved: the layer's input and its norm's output; q, k and v before and after the convolution; the gate; the
// output of the delta rule, its norm, and the gated norm; step sizes and decays with their inputs; factors of
// norms. Temporary: the operands of the chunks' products and their gradients, in the precision of sums.
void add_mixer(const GatedDeltaSpec& delta, int64_t hidden, LayerCost* cost) {
  const int64_t heads = delta.linear_num_value_heads, values = delta.value_size();
  const int64_t keys = heads * delta.linear_key_head_dim;  // as many heads as values have
  cost->weights += hidden * (delta.conv_size() + 2 * values + 2 * heads);
  cost->weights_after_mixer += hidden * values;
  cost->recurrence =
      3 * delta.state_size() + kChunkTokens * (3 * keys + 2 * values + heads * kChunkTokens / 3);
  cost->kept_by_mixer = {.elements = 2 * hidden + 2 * delta.conv_size() + 4 * values + 2 * heads,
                         .statistics = 1 + 7 * heads};
  cost->mixer_output = values;
  cost->mixer_gradients =
      12 * keys + 7 * values + heads * 9 * kChunkTokens + 2 * delta.state_size() / kChunkTokens;
  cost->context_per_cut = delta.state_size() + (delta.linear_conv_kernel_dim - 1) * delta.conv_size();
}

// Saved: the layer's input and its norm's output; the projection and its convolved part; the outputs of the
// scan and the gated norm; in the precision of sums the gated output and its norm, steps with their inputs,
// factors of norms. Temporary: as for the gated delta rule.
void add_mixer(const SsmSpec& ssm, int64_t hidden, LayerCost* cost) {
  const int64_t heads = ssm.num_heads, inner = ssm.inner_size(), groups = ssm.n_groups * ssm.state_size;
  cost->weights += hidden * (ssm.projection_size() + inner);
  cost->weights_after_mixer += hidden * inner;
  cost->max_weight_rows = ssm.projection_size();
  cost->recurrence = 2 * ssm.state_elements() + kChunkTokens * (groups + inner);
  cost->kept_by_mixer = {.elements = 2 * hidden + ssm.projection_size() + ssm.conv_size() + 2 * inner,
                         .statistics = 1 + 2 * inner + 4 * heads + ssm.n_groups};
  cost->mixer_output = 2 * inner;  // and the gate
  cost->mixer_gradients =
      8 * (inner + groups) + heads * 5 * kChunkTokens + 4 * ssm.state_elements() / kChunkTokens;
  cost->context_per_cut = ssm.state_elements() + (ssm.conv_kernel - 1) * ssm.conv_size();
}

void add_mixer(const NoMixer&, int64_t, LayerCost*) {}

void add_mlp(const NoMlp&, int64_t, LayerCost*) {}

/// The linear maps of an MLP; also the tensors of its width that it saves: gate, up and their product, or
/// relu(up) and its square.
int64_t num_maps(const MlpNames& names) {
  return names.gated() ? 3 : 2;
}

// Saved: the MLP's input, its norm's output and factor, and what num_maps counts.
void add_mlp(const DenseMlpSpec& mlp, int64_t hidden, LayerCost* cost) {
  const int64_t maps = num_maps(mlp.names), weights = maps * hidden * mlp.intermediate_size;
  cost->weights += weights;
  cost->weights_after_mixer += weights;
  if (mlp.bias) cost->biases += (maps - 1) * mlp.intermediate_size + hidden;
  cost->max_weight_rows =
      std::max(cost->max_weight_rows, (mlp.names.fused() ? 2 : 1) * mlp.intermediate_size);
  cost->kept_after_mixer = {.elements = 2 * hidden + maps * mlp.intermediate_size, .statistics = 1};
  cost->intermediate = mlp.intermediate_size;
}

// Saved: the input, its norm's output and factor; scores, weights and indices of the chosen experts; for each
// of them the token's copy, the output, and what num_maps counts; for shared experts as for a dense MLP.
void add_mlp(const MoeSpec& moe, int64_t hidden, LayerCost* cost) {
  const int64_t chosen = moe.num_experts_per_tok, width = moe.moe_intermediate_size;
  const int64_t shared = moe.shared_intermediate_size, maps = num_maps(moe.names);
  const int64_t weights = hidden * (moe.num_experts + maps * (chosen * width + shared));
  cost->weights += weights;
  cost->weights_after_mixer += weights;
  cost->idle_weights += maps * hidden * width * (moe.num_experts - chosen);
  // The gradients of the activation of clamped experts are computed in the precision of sums.
  const bool clamped = moe.clamped_swiglu.has_value();
  if (clamped) cost->biases += moe.num_experts * (1 + 2 * width + hidden);
  cost->max_weight_rows =
      std::max(cost->max_weight_rows, (moe.names.fused() || clamped ? 2 : 1) * std::max(width, shared));
  cost->kept_after_mixer = {.elements = 2 * hidden + chosen * (2 * hidden + maps * width) + maps * shared,
                            .statistics = 1 + moe.num_experts + 12 * chosen};
  cost->intermediate = chosen * hidden + std::max(clamped ? 3 * width : width, shared);
}

}  // namespace

LayerCost layer_cost(const LayerSpec& layer, int64_t hidden_size) {
  LayerCost cost;
  std::visit([&](const auto& mixer) { add_mixer(mixer, hidden_size, &cost); }, layer.mixer);
  std::visit([&](const auto& mlp) { add_mlp(mlp, hidden_size, &cost); }, layer.mlp);
  // The outputs of mixer and MLP and the factors of their norms; without norms of inputs in place of theirs.
  if (layer.norm_inputs && layer.norm_outputs) {
    cost.kept_after_mixer.elements += 2 * hidden_size;
    cost.kept_after_mixer.statistics += 2;
  }
  return cost;
}

int64_t ModelCost::sum(int64_t LayerCost::* member) const {
  int64_t sum = 0;
  for (const LayerCost& layer : layers) sum += layer.*member;
  return sum;
}

double ModelCost::attention_layers() const {
  return static_cast<double>(
      std::ranges::count_if(layers, [](const LayerCost& layer) { return layer.pair_elements > 0; }));
}

int64_t ModelCost::position_tables() const {
  int64_t most = 0;
  for (const LayerCost& layer : layers) most = std::max(most, layer.position_tables);
  return rope_tables * most;
}

std::vector<int64_t> ModelCost::sliding_windows() const {
  std::set<int64_t> windows;
  for (const LayerCost& layer : layers) {
    if (layer.pair_elements > 0 && layer.sliding_window > 0) windows.insert(layer.sliding_window);
  }
  return {windows.begin(), windows.end()};
}

double weighted_pairs(const ModelCost& model, int64_t pairs, std::span<const int64_t> window_pairs,
                      int64_t (*weight)(const LayerCost&)) {
  const std::vector<int64_t> windows = model.sliding_windows();
  ESPALIER_ASSERT(windows.size() == window_pairs.size() || (window_pairs.empty() && pairs == 0));
  double sum = 0;
  for (const LayerCost& layer : model.layers) {
    if (layer.pair_elements == 0 || pairs == 0) continue;
    int64_t visible = pairs;
    if (layer.sliding_window > 0) {
      visible = window_pairs[std::ranges::lower_bound(windows, layer.sliding_window) - windows.begin()];
    }
    sum += static_cast<double>(weight(layer)) * static_cast<double>(visible);
  }
  return sum;
}

ModelCost model_cost(const ModelSpec& spec) {
  ModelCost cost{.hidden_size = spec.hidden_size,
                 .vocab_size = spec.vocab_size,
                 .layers = {},
                 .rope_tables = spec.rope_tables};
  for (const LayerSpec& layer : spec.layers) cost.layers.push_back(layer_cost(layer, spec.hidden_size));
  return cost;
}

}  // namespace espalier
