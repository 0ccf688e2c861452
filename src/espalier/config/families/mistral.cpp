// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/families/family.h"
#include "espalier/config/sliding_window.h"

namespace espalier {

namespace {

// Llama without biases, with one window for all layers, unless sliding_window is null.
void read_mistral(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  refuse_biases(config);
  result->layers.assign(result->layers.size(), {common.attention, common.mlp});
  read_common_window(config, /*default_window=*/4096, result);
}

}  // namespace

constexpr ModelFamily kMistralFamily{
    .model_type = "mistral",
    .max_position_embeddings = 131072,
    .num_key_value_heads = 8,
    .head_dim = 0,
    .read = read_mistral,
};

}  // namespace espalier
