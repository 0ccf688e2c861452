// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cmath>

#include "espalier/config/families/experts.h"
#include "espalier/config/families/family.h"
#include "espalier/config/sliding_window.h"

namespace espalier {
namespace {

LatentAttentionSpec read_attention(const ConfigReader& config, const AttentionSpec& common,
                                   const Rope& rope) {
  LatentAttentionSpec attention{
      .num_attention_heads = common.num_attention_heads,
      .q_lora_rank = config.has("q_lora_rank") && config.find("q_lora_rank") == nullptr
                         ? 0
                         : config.positive_integer("q_lora_rank", kMostHidden, 1536),
      .kv_lora_rank = config.positive_integer("kv_lora_rank", kMostHidden, 512),
      .qk_nope_head_dim = config.positive_integer("qk_nope_head_dim", kMostHeadDim, 128),
      .qk_rope_head_dim = config.positive_integer("qk_rope_head_dim", kMostHeadDim, 64),
      .v_head_dim = config.positive_integer("v_head_dim", kMostHeadDim, 128),
      .bias = config.boolean("attention_bias", false),
      .rope_interleave = config.boolean("rope_interleave", true)};
  const int64_t heads = attention.num_attention_heads;
  if (common.num_key_value_heads != heads) {
    config.refuse("num_key_value_heads", fmt::format("num_attention_heads, {}", heads));
  }
  if (attention.qk_rope_head_dim % 2 != 0) config.refuse("qk_rope_head_dim", "an even size");
  if (attention.v_head_dim > attention.qk_head_dim()) {
    config.refuse("v_head_dim", fmt::format("at most that of keys, {}", attention.qk_head_dim()));
  }
  attention.softmax_scale = std::pow(static_cast<double>(attention.qk_head_dim()), -0.5);
  if (const auto* yarn = std::get_if<YarnRope>(&rope.scaling); yarn != nullptr && yarn->mscale_all_dim > 0) {
    attention.softmax_scale *= std::pow(yarn_scale(yarn->factor, yarn->mscale_all_dim), 2);
  }
  return attention;
}

void read_deepseek_v3(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  refuse_sliding_windows(config, result->num_hidden_layers());
  if (config.boolean("mlp_bias", false)) config.refuse("mlp_bias", "false");
  if (config.positive_integer("moe_layer_freq", kMostLayers, 1) != 1) config.refuse("moe_layer_freq", "1");
  config.require_text("scoring_func", "sigmoid");
  config.require_text("topk_method", "noaux_tc");
  const LatentAttentionSpec attention = read_attention(config, common.attention, result->rope);
  result->layers.assign(result->layers.size(), {attention, common.mlp});
  set_grouped_experts(
      config, {.n_group = 8, .topk_group = 4, .routed_scaling_factor = 2.5, .first_k_dense_replace = 3},
      result);
}

}  // namespace

constexpr ModelFamily kDeepseekV3Family{
    .model_type = "deepseek_v3",
    .max_position_embeddings = 4096,
    .num_key_value_heads = 128,
    .head_dim = 64,  // unused: latent attention has its own sizes
    // Transformers computes head_dim and qk_head_dim. auto_map: released files name their own classes,
    // from before Transformers had the family. ep_size, seq_aux and aux_loss_alpha concern the original
    // training.
    .keys =
        "auto_map aux_loss_alpha n_routed_experts first_k_dense_replace ep_size kv_lora_rank "
        "n_shared_experts moe_intermediate_size n_group moe_layer_freq num_local_experts num_experts_per_tok "
        "q_lora_rank norm_topk_prob num_mtp_layers num_nextn_predict_layers seq_aux qk_head_dim "
        "qk_nope_head_dim routed_scaling_factor topk_group scoring_func qk_rope_head_dim v_head_dim "
        "topk_method rope_interleave",
    .bias_keys = "self_attn.q_proj.= self_attn.q_b_proj.= self_attn.kv_b_proj.= self_attn.=attention_bias",
    .read = read_deepseek_v3,
};

}  // namespace espalier
