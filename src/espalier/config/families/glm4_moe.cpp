// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <array>

#include "espalier/config/families/experts.h"
#include "espalier/config/families/family.h"
#include "espalier/config/sliding_window.h"

namespace espalier {

namespace {

/// Groups of experts: Transformers scores a group by its two best experts.
void read_groups(const ConfigReader& config, MoeSpec* moe) {
  moe->n_group = config.positive_integer("n_group", moe->num_experts, 1);
  moe->topk_group = config.positive_integer("topk_group", moe->n_group, 1);
  const int64_t size = moe->num_experts / moe->n_group;
  if (moe->num_experts % moe->n_group != 0 || size < 2) {
    config.refuse("n_group", fmt::format("a divisor of the {} experts with two experts in each group or more",
                                         moe->num_experts));
  }
  if (moe->num_experts_per_tok > moe->topk_group * size) {
    config.refuse("num_experts_per_tok",
                  fmt::format("at most the {} experts of topk_group groups", moe->topk_group * size));
  }
}

void read_glm4_moe(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  AttentionSpec attention = common.attention;
  attention.bias = config.boolean("attention_bias", false);
  if (config.boolean("mlp_bias", false)) config.refuse("mlp_bias", "false");
  refuse_sliding_windows(config, result->num_hidden_layers());
  attention.query_key_norm = config.boolean("use_qk_norm", false);
  result->layers.assign(result->layers.size(), {attention, common.mlp});
  MoeSpec moe = read_experts(config, "n_routed_experts", /*norm_topk_prob=*/true);
  moe.scores = RouterScores::kSigmoid;
  moe.correction_bias = true;
  moe.routed_scaling_factor = config.positive_number("routed_scaling_factor", 1.0);
  moe.shared_intermediate_size =
      moe.moe_intermediate_size * config.positive_integer("n_shared_experts", kMostExperts, 1);
  read_groups(config, &moe);
  for (int64_t i = config.integer_from_0("first_k_dense_replace", kMostLayers, 1);
       i < result->num_hidden_layers(); ++i) {
    result->layers[i].mlp = moe;
  }
  const std::string old_key = "num_nextn_predict_layers", key = "num_mtp_layers";
  result->num_prediction_layers =
      config.integer_from_0(config.find(old_key) != nullptr ? old_key : key, kMostLayers, 1);
}

constexpr auto kGlm4MoeKeys = std::to_array<std::string_view>(
    {"first_k_dense_replace", "moe_intermediate_size", "n_group", "n_routed_experts", "n_shared_experts",
     "norm_topk_prob", "num_experts_per_tok", "num_local_experts", "num_mtp_layers",
     "num_nextn_predict_layers", "routed_scaling_factor", "topk_group", "use_qk_norm"});

}  // namespace

constexpr ModelFamily kGlm4MoeFamily{
    .model_type = "glm4_moe",
    .max_position_embeddings = 131072,
    .num_key_value_heads = 8,
    .rms_norm_eps = 1e-5,
    .partial_rotary_factor = 0.5,
    .keys = kGlm4MoeKeys,
    .read = read_glm4_moe,
};

}  // namespace espalier
