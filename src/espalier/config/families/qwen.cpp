// SPDX-License-Identifier: Apache-2.0
// The families of Qwen whose layers all have attention.
#include "espalier/config/families/experts.h"
#include "espalier/config/families/family.h"
#include "espalier/config/sliding_window.h"

namespace espalier {
namespace {

void read_qwen2(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  // Transformers hard-codes the biases: on q, k and v, not on o.
  if (!config.boolean("attention_bias", true)) config.refuse("attention_bias", "true for qwen2");
  AttentionSpec attention = common.attention;
  attention.bias = true;
  if (config.boolean("mlp_bias", false)) config.refuse("mlp_bias", "false");
  result->layers.assign(result->layers.size(), {attention, common.mlp});
  read_switched_window(config, result);
}

void read_qwen3(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  AttentionSpec attention = common.attention;
  read_biases(config, &attention);
  attention.query_key_norm = true;
  result->layers.assign(result->layers.size(), {attention, common.mlp});
  read_switched_window(config, result);
}

void read_qwen3_moe(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  AttentionSpec attention = common.attention;
  read_biases(config, &attention);
  refuse_sliding_windows(config, result->num_hidden_layers());
  attention.query_key_norm = true;
  result->layers.assign(result->layers.size(), {attention, common.mlp});
  set_sparse_layers(config, read_experts(config, "num_experts", /*norm_topk_prob=*/false), result);
}

}  // namespace

constexpr ModelFamily kQwen2Family{
    .model_type = "qwen2",
    .max_position_embeddings = 32768,
    .num_key_value_heads = 32,
    .read = read_qwen2,
};

constexpr ModelFamily kQwen3Family{
    .model_type = "qwen3",
    .max_position_embeddings = 32768,
    .num_key_value_heads = 32,
    .head_dim = 128,
    .bias_keys = "self_attn.=attention_bias",
    .read = read_qwen3,
};

constexpr ModelFamily kQwen3MoeFamily{
    .model_type = "qwen3_moe",
    .max_position_embeddings = 32768,
    .num_key_value_heads = 4,
    .keys =
        "decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts "
        "num_experts_per_tok num_local_experts router_aux_loss_coef",
    .bias_keys = "self_attn.=attention_bias",
    .read = read_qwen3_moe,
};

}  // namespace espalier
