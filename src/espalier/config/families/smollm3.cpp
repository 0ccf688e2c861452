// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "espalier/config/families/family.h"
#include "espalier/config/sliding_window.h"

namespace espalier {
namespace {

/// For each layer, whether it rotates queries and keys.
std::vector<bool> rotary_layers(const ConfigReader& config, int64_t num_hidden_layers) {
  const int64_t interval = config.positive_integer("no_rope_layer_interval", kMostLayers, 4);
  const nlohmann::json* given = config.find("no_rope_layers");
  std::vector<bool> rotary(num_hidden_layers);
  for (int64_t i = 0; i < num_hidden_layers; ++i) {
    const bool fits = given == nullptr || (given->is_array() && i < static_cast<int64_t>(given->size()) &&
                                           ((*given)[i] == 0 || (*given)[i] == 1));
    if (!fits) {
      config.refuse("no_rope_layers", fmt::format("1 for layers with rope and 0 for others, for each of {}",
                                                  num_hidden_layers));
    }
    rotary[i] = given == nullptr ? (i + 1) % interval != 0 : (*given)[i] == 1;
  }
  return rotary;
}

// Llama, some of whose layers have no positions. Without layer_types these layers have the window.
void read_smollm3(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  auto [attention, mlp] = common;
  read_biases(config, &attention, &mlp);
  result->layers.assign(result->layers.size(), {attention, mlp});
  std::vector<bool> layers = rotary_layers(config, result->num_hidden_layers());
  for (size_t i = 0; i < layers.size(); ++i) {
    std::get<AttentionSpec>(result->layers[i].mixer).rotary = layers[i];
  }
  layers.flip();
  const bool uses_window =
      config.boolean("use_sliding_window", false) && config.find("sliding_window") != nullptr;
  read_window(config, uses_window, layers, result);
}

}  // namespace

constexpr ModelFamily kSmolLm3Family{
    .model_type = "smollm3",
    .max_position_embeddings = 32768,
    .num_key_value_heads = 4,
    .rope_theta = 2000000,
    .tie_word_embeddings = true,
    .pad_token_id = 128004,
    // Transformers ignores pretraining_tp, which the first release has.
    .keys = "no_rope_layer_interval no_rope_layers pretraining_tp",
    .bias_keys = "self_attn.=attention_bias mlp.=mlp_bias",
    .read = read_smollm3,
};

}  // namespace espalier
