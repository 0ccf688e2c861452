// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/families/experts.h"
#include "espalier/config/families/family.h"
#include "espalier/config/sliding_window.h"

namespace espalier {
namespace {

void read_glm4_moe(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  AttentionSpec attention = common.attention;
  attention.bias = config.boolean("attention_bias", false);
  if (config.boolean("mlp_bias", false)) config.refuse("mlp_bias", "false");
  refuse_sliding_windows(config, result->num_hidden_layers());
  attention.query_key_norm = config.boolean("use_qk_norm", false);
  result->layers.assign(result->layers.size(), {attention, common.mlp});
  set_grouped_experts(config, {}, result);
}

}  // namespace

constexpr ModelFamily kGlm4MoeFamily{
    .model_type = "glm4_moe",
    .max_position_embeddings = 131072,
    .num_key_value_heads = 8,
    .rms_norm_eps = 1e-5,
    .partial_rotary_factor = 0.5,
    .keys =
        "first_k_dense_replace moe_intermediate_size n_group n_routed_experts n_shared_experts "
        "norm_topk_prob num_experts_per_tok num_local_experts num_mtp_layers num_nextn_predict_layers "
        "routed_scaling_factor topk_group use_qk_norm",
    .bias_keys = "self_attn.o_proj.= self_attn.=attention_bias",
    .read = read_glm4_moe,
};

}  // namespace espalier
