// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/families/family.h"
#include "espalier/config/sliding_window.h"

namespace espalier {

namespace {

void read_llama(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  auto [attention, mlp] = common;
  read_biases(config, &attention, &mlp);
  refuse_sliding_windows(config, result->num_hidden_layers());
  result->layers.assign(result->layers.size(), {attention, mlp});
}

}  // namespace

constexpr ModelFamily kLlamaFamily{
    .model_type = "llama",
    .max_position_embeddings = 2048,
    .num_key_value_heads = 0,
    .head_dim = 0,
    .read = read_llama,
};

}  // namespace espalier
