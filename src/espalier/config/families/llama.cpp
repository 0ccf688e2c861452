// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/families/family.h"
#include "espalier/config/sliding_window.h"

namespace espalier {

namespace {

void read_keys(const ConfigReader& config, DecoderConfig* result) {
  result->attention_bias = config.boolean("attention_bias", false);
  result->attention_output_bias = result->attention_bias;
  result->mlp_bias = config.boolean("mlp_bias", false);
  refuse_sliding_windows(config, *result);
}

}  // namespace

constexpr ModelFamily kLlamaFamily{
    .model_type = "llama",
    .max_position_embeddings = 2048,
    .num_key_value_heads = 0,
    .head_dim = 0,
    .read = read_keys,
};

}  // namespace espalier
