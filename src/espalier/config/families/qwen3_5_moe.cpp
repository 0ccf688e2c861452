// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "espalier/config/families/experts.h"
#include "espalier/config/families/family.h"
#include "espalier/config/families/gated_delta_keys.h"

namespace espalier {

namespace {

void read_qwen3_5_moe(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  read_gated_delta_layers(config, common, result);
  MoeSpec moe = read_experts(config, "num_experts", /*norm_topk_prob=*/true);
  if (!moe.norm_topk_prob) config.refuse("norm_topk_prob", "true");
  read_shared_expert(config, &moe);
  for (LayerSpec& layer : result->layers) layer.mlp = moe;
}

// Keys of multi-token prediction heads and the dtype of states, as in qwen3_5.
constexpr auto kQwen35MoeKeys = std::to_array<std::string_view>(
    {"attn_output_gate", "full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim",
     "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim", "mamba_ssm_dtype",
     "moe_intermediate_size", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "norm_topk_prob",
     "num_experts", "num_experts_per_tok", "num_local_experts", "router_aux_loss_coef",
     "shared_expert_intermediate_size"});

}  // namespace

constexpr ModelFamily kQwen35MoeFamily{
    .model_type = "qwen3_5_moe_text",
    .max_position_embeddings = 32768,
    .num_key_value_heads = 2,
    .head_dim = 256,
    .partial_rotary_factor = 0.25,
    .composite_type = "qwen3_5_moe",
    .only_experts = true,
    .keys = kQwen35MoeKeys,
    .read = read_qwen3_5_moe,
};

}  // namespace espalier
