// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/families/family.h"
#include "espalier/config/sliding_window.h"

namespace espalier {

namespace {

void read_qwen3(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  AttentionSpec attention = common.attention;
  read_biases(config, &attention);
  attention.query_key_norm = true;
  result->layers.assign(result->layers.size(), {attention, common.mlp});
  read_switched_window(config, result);
}

}  // namespace

constexpr ModelFamily kQwen3Family{
    .model_type = "qwen3",
    .max_position_embeddings = 32768,
    .num_key_value_heads = 32,
    .head_dim = 128,
    .read = read_qwen3,
};

}  // namespace espalier
