// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "espalier/config/families/family.h"
#include "espalier/config/sliding_window.h"

namespace espalier {

namespace {

void read_granite(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  auto [attention, mlp] = common;
  read_biases(config, &attention, &mlp);
  read_multipliers(config, &attention, result);
  refuse_sliding_windows(config, result->num_hidden_layers());
  result->layers.assign(result->layers.size(), {attention, mlp});
}

constexpr auto kGraniteKeys = std::to_array<std::string_view>(
    {"attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"});

}  // namespace

constexpr ModelFamily kGraniteFamily{
    .model_type = "granite",
    .max_position_embeddings = 2048,
    .num_key_value_heads = 0,
    .head_dim = 0,
    .keys = kGraniteKeys,
    .read = read_granite,
};

}  // namespace espalier
