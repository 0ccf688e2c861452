// SPDX-License-Identifier: Apache-2.0
// Llama, and Mistral's families, which are Llama with windows.
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

// Llama without biases, with one window for all layers, unless sliding_window is null.
void read_mistral(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  refuse_biases(config);
  result->layers.assign(result->layers.size(), {common.attention, common.mlp});
  read_common_window(config, /*default_window=*/4096, result);
}

// Mistral, with the window in the layers that layer_types names.
void read_ministral(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  refuse_biases(config);
  if (config.find("use_sliding_window") != nullptr) {
    config.refuse("use_sliding_window", "no such key: layer_types and sliding_window decide in ministral");
  }
  result->layers.assign(result->layers.size(), {common.attention, common.mlp});
  const bool uses_window = has_window(config);
  read_window(config, uses_window, std::vector<bool>(result->layers.size(), uses_window), result);
}

}  // namespace

constexpr ModelFamily kLlamaFamily{
    .model_type = "llama",
    .max_position_embeddings = 2048,
    .bias_keys = "self_attn.=attention_bias mlp.=mlp_bias",
    .read = read_llama,
};

constexpr ModelFamily kMistralFamily{
    .model_type = "mistral",
    .max_position_embeddings = 131072,
    .num_key_value_heads = 8,
    .read = read_mistral,
};

constexpr ModelFamily kMinistralFamily{
    .model_type = "ministral",
    .max_position_embeddings = 131072,
    .num_key_value_heads = 8,
    .read = read_ministral,
};

}  // namespace espalier
