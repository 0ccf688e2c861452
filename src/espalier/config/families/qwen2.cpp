// SPDX-License-Identifier: Apache-2.0
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

}  // namespace

constexpr ModelFamily kQwen2Family{
    .model_type = "qwen2",
    .max_position_embeddings = 32768,
    .num_key_value_heads = 32,
    .head_dim = 0,
    .read = read_qwen2,
};

}  // namespace espalier
