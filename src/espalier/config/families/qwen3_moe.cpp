// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <array>
#include <set>

#include "espalier/config/families/experts.h"
#include "espalier/config/families/family.h"
#include "espalier/config/sliding_window.h"

namespace espalier {

namespace {

/// Layers with a dense MLP whatever decoder_sparse_step says.
std::set<int64_t> mlp_only_layers(const ConfigReader& config, int64_t num_hidden_layers) {
  std::set<int64_t> layers;
  const nlohmann::json* given = config.find("mlp_only_layers");
  if (given == nullptr) return layers;
  const std::string expected = fmt::format("a list of layers from 0 to {}", num_hidden_layers - 1);
  if (!given->is_array()) config.refuse("mlp_only_layers", expected);
  for (const nlohmann::json& layer : *given) {
    if (!layer.is_number_integer() || layer < 0 || layer >= num_hidden_layers) {
      config.refuse("mlp_only_layers", expected);
    }
    layers.insert(layer.get<int64_t>());
  }
  return layers;
}

void read_keys(const ConfigReader& config, DecoderConfig* result) {
  result->attention_bias = config.boolean("attention_bias", false);
  result->attention_output_bias = result->attention_bias;
  if (config.boolean("mlp_bias", false)) config.refuse("mlp_bias", "false");
  refuse_sliding_windows(config, *result);
  result->query_key_norm = true;
  result->moe = read_experts(config, "num_experts", /*norm_topk_prob=*/false);
  const int64_t step = config.positive_integer("decoder_sparse_step", kMostLayers, 1);
  const std::set<int64_t> dense = mlp_only_layers(config, result->num_hidden_layers);
  for (int64_t i = 0; i < result->num_hidden_layers; ++i) {
    if (!dense.contains(i) && (i + 1) % step == 0) result->moe_layers.push_back(i);
  }
}

constexpr auto kKeys = std::to_array<std::string_view>(
    {"decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob", "num_experts",
     "num_experts_per_tok", "num_local_experts", "router_aux_loss_coef"});

}  // namespace

constexpr ModelFamily kQwen3MoeFamily{
    .model_type = "qwen3_moe",
    .max_position_embeddings = 32768,
    .num_key_value_heads = 4,
    .head_dim = 0,
    .keys = kKeys,
    .read = read_keys,
};

}  // namespace espalier
