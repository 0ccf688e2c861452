// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/families/family.h"
#include "espalier/config/sliding_window.h"

namespace espalier {

namespace {

// Llama without biases, with one window for all layers, unless sliding_window is null.
void read_keys(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  for (const char* key : {"attention_bias", "mlp_bias"}) {
    if (config.boolean(key, false)) config.refuse(key, "false");
  }
  if (config.find("use_sliding_window") != nullptr) {
    config.refuse("use_sliding_window", "no such key: sliding_window alone decides in mistral");
  }
  const bool has_window = !config.has("sliding_window") || config.find("sliding_window") != nullptr;
  const std::vector<bool> sliding(result->num_hidden_layers(), has_window);
  if (read_layer_types(config, result->num_hidden_layers()).value_or(sliding) != sliding) {
    config.refuse("layer_types", has_window
                                     ? "\"sliding_attention\" for every layer, as sliding_window is given"
                                     : "\"full_attention\" for every layer, as sliding_window is null");
  }
  result->layers.assign(result->layers.size(), {common.attention, common.mlp});
  set_sliding_layers(config, sliding, result);
}

}  // namespace

constexpr ModelFamily kMistralFamily{
    .model_type = "mistral",
    .max_position_embeddings = 131072,
    .num_key_value_heads = 8,
    .head_dim = 0,
    .read = read_keys,
};

}  // namespace espalier
