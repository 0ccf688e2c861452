// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "espalier/config/families/experts.h"
#include "espalier/config/families/family.h"
#include "espalier/config/families/gated_delta_keys.h"

namespace espalier {

namespace {

void read_qwen3_next(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  read_gated_delta_layers(config, common, result);
  for (LayerSpec& layer : result->layers) {
    if (auto* delta = std::get_if<GatedDeltaSpec>(&layer.mixer)) delta->fused_projections = true;
  }
  MoeSpec moe = read_experts(config, "num_experts", /*norm_topk_prob=*/true);
  read_shared_expert(config, &moe);
  set_sparse_layers(config, moe, result);
}

constexpr auto kQwen3NextKeys = std::to_array<std::string_view>(
    {"decoder_sparse_step", "full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim",
     "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim", "mlp_only_layers",
     "moe_intermediate_size", "norm_topk_prob", "num_experts", "num_experts_per_tok", "num_local_experts",
     "router_aux_loss_coef", "shared_expert_intermediate_size"});

}  // namespace

constexpr ModelFamily kQwen3NextFamily{
    .model_type = "qwen3_next",
    .max_position_embeddings = 32768,
    .num_key_value_heads = 2,
    .head_dim = 256,
    .partial_rotary_factor = 0.25,
    .keys = kQwen3NextKeys,
    .read = read_qwen3_next,
};

}  // namespace espalier
