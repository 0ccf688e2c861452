// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/families/family.h"
#include "espalier/config/sliding_window.h"

namespace espalier {
namespace {

void read_mixtral(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  refuse_biases(config);
  const int64_t num_experts = config.positive_integer("num_local_experts", kMostExperts, 8);
  const MoeSpec moe{
      .num_experts = num_experts,
      .num_experts_per_tok = config.positive_integer("num_experts_per_tok", num_experts, 2),
      .moe_intermediate_size = config.positive_integer("intermediate_size", kMostIntermediate),
      .norm_topk_prob = true,
      .names = {.gate = "w1", .up = "w3", .down = "w2"},
      .router_name = "block_sparse_moe.gate",
      .experts_name = "block_sparse_moe.experts",
  };
  result->layers.assign(result->layers.size(), {common.attention, moe});
  read_common_window(config, /*default_window=*/0, result);
}

}  // namespace

constexpr ModelFamily kMixtralFamily{
    .model_type = "mixtral",
    .max_position_embeddings = 131072,
    .num_key_value_heads = 8,
    .rms_norm_eps = 1e-5,
    .rope_theta = 1000000,
    .only_experts = true,
    .keys = "num_experts_per_tok num_local_experts router_aux_loss_coef",
    .read = read_mixtral,
};

}  // namespace espalier
