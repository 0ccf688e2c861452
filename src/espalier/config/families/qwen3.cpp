// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/families/family.h"
#include "espalier/config/sliding_window.h"

namespace espalier {

namespace {

void read_keys(const ConfigReader& config, DecoderConfig* result) {
  result->attention_bias = config.boolean("attention_bias", false);
  result->attention_output_bias = result->attention_bias;
  if (config.boolean("mlp_bias", false)) config.refuse("mlp_bias", "false");
  result->query_key_norm = true;
  read_switched_window(config, result);
}

}  // namespace

constexpr ModelFamily kQwen3Family{
    .model_type = "qwen3",
    .max_position_embeddings = 32768,
    .num_key_value_heads = 32,
    .head_dim = 128,
    .read = read_keys,
};

}  // namespace espalier
