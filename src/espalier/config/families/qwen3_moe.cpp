// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "espalier/config/families/experts.h"
#include "espalier/config/families/family.h"
#include "espalier/config/sliding_window.h"

namespace espalier {

namespace {

void read_keys(const ConfigReader& config, DecoderConfig* result) {
  result->attention_bias = config.boolean("attention_bias", false);
  result->attention_output_bias = result->attention_bias;
  if (config.boolean("mlp_bias", false)) config.refuse("mlp_bias", "false");
  refuse_sliding_windows(config, *result);
  result->query_key_norm = true;
  result->moe = read_experts(config, "num_experts", /*norm_topk_prob=*/false);
  result->moe_layers = read_sparse_layers(config, result->num_hidden_layers);
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
