// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/families/family.h"
#include "espalier/config/sliding_window.h"

namespace espalier {
namespace {

void read_seed_oss(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  for (const char* key : {"attention_dropout", "residual_dropout"}) {
    // Where the key is absent it is 0.1.
    if (config.find(key) == nullptr || *config.find(key) != 0) config.refuse(key, "0.0");
  }
  auto [attention, mlp] = common;
  attention.bias = config.boolean("attention_bias", true);
  attention.output_bias = config.boolean("attention_out_bias", false);
  mlp.bias = config.boolean("mlp_bias", false);
  refuse_sliding_windows(config, result->num_hidden_layers());
  result->layers.assign(result->layers.size(), {attention, mlp});
}

}  // namespace

constexpr ModelFamily kSeedOssFamily{
    .model_type = "seed_oss",
    .max_position_embeddings = 524288,
    .num_key_value_heads = 8,
    .head_dim = 128,
    .null_head_dim = true,
    .pad_token_id = 1,
    .keys = "attention_out_bias residual_dropout",
    .bias_keys = "self_attn.o_proj.=attention_out_bias self_attn.=attention_bias mlp.=mlp_bias",
    .read = read_seed_oss,
};

}  // namespace espalier
