// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cmath>

#include "espalier/config/families/gemma_keys.h"
#include "espalier/config/sliding_window.h"

namespace espalier {

namespace {

// null is no softcap.
double read_softcap(const ConfigReader& config, const char* key, double otherwise) {
  return config.has(key) && config.find(key) == nullptr ? 0 : config.positive_number(key, otherwise);
}

// Norms come before and after attention and MLP. Without layer_types every other layer has the window,
// beginning with the first.
void read_keys(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  LayerSpec layer = read_gemma_layer(config, common, "hidden_activation", result);
  layer.norm_outputs = true;
  auto& attention = std::get<AttentionSpec>(layer.mixer);
  attention.attention_multiplier = std::pow(config.positive_number("query_pre_attn_scalar", 256), -0.5);
  attention.softcap = read_softcap(config, "attn_logit_softcapping", 50);
  result->final_logit_softcapping = read_softcap(config, "final_logit_softcapping", 30);
  result->layers.assign(result->layers.size(), layer);
  std::vector<bool> sliding(result->layers.size());
  for (size_t i = 0; i < sliding.size(); i += 2) sliding[i] = true;
  set_sliding_layers(config, read_layer_types(config, result->num_hidden_layers()).value_or(sliding), result);
}

// hidden_act is of files of Transformers 4, which ignores it.
constexpr auto kKeys = std::to_array<std::string_view>(
    {"attn_logit_softcapping", "cache_implementation", "final_logit_softcapping", "hidden_act",
     "hidden_activation", "query_pre_attn_scalar", "use_bidirectional_attention"});

}  // namespace

constexpr ModelFamily kGemma2Family{
    .model_type = "gemma2",
    .max_position_embeddings = 8192,
    .num_key_value_heads = 4,
    .head_dim = 256,
    .tie_word_embeddings = true,
    .pad_token_id = 0,
    .keys = kKeys,
    .read = read_keys,
};

}  // namespace espalier
