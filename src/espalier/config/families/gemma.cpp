// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cmath>

#include "espalier/config/families/family.h"
#include "espalier/config/sliding_window.h"

namespace espalier {
namespace {

/// A layer with biases by attention_bias, norms around 1 and an MLP of gelu, which must be the value of
/// `act_key`; and the factor of the embedding. Refuses attention that is not causal.
LayerSpec read_gemma_layer(const ConfigReader& config, const CommonParts& common, const char* act_key,
                           DecoderConfig* result) {
  auto [attention, mlp] = common;
  read_biases(config, &attention);
  config.require_text(act_key, "gelu_pytorch_tanh");
  mlp.activation = Activation::kGeluTanh;
  if (config.boolean("use_bidirectional_attention", false)) {
    config.refuse("use_bidirectional_attention", "false");
  }
  result->embedding_multiplier = std::sqrt(static_cast<double>(result->hidden_size));
  result->round_embedding_multiplier = true;
  return {.mixer = attention, .mlp = mlp, .zero_centered_norm = true};
}

// hidden_activation is what older versions of Transformers read instead of hidden_act.
void read_gemma(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  config.require_text("hidden_activation", "gelu_pytorch_tanh");
  refuse_sliding_windows(config, result->num_hidden_layers());
  result->layers.assign(result->layers.size(), read_gemma_layer(config, common, "hidden_act", result));
}

// null is no softcap.
double read_softcap(const ConfigReader& config, const char* key, double otherwise) {
  return config.has(key) && config.find(key) == nullptr ? 0 : config.positive_number(key, otherwise);
}

// Norms come before and after attention and MLP. Without layer_types every other layer has the window,
// beginning with the first.
void read_gemma2(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
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

// Norms come before and after attention and MLP. Without layer_types all but every sliding_window_pattern-th
// layer have the window.
void read_gemma3(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  for (const char* key : {"attn_logit_softcapping", "final_logit_softcapping", "use_sliding_window"}) {
    if (config.find(key) != nullptr) config.refuse(key, "null");
  }
  LayerSpec layer = read_gemma_layer(config, common, "hidden_activation", result);
  layer.norm_outputs = true;
  auto& attention = std::get<AttentionSpec>(layer.mixer);
  attention.query_key_norm = true;
  attention.attention_multiplier = std::pow(config.positive_number("query_pre_attn_scalar", 256), -0.5);
  result->layers.assign(result->layers.size(), layer);
  const int64_t pattern = config.positive_integer("sliding_window_pattern", kMostLayers, 6);
  std::vector<bool> sliding(result->layers.size());
  for (int64_t i = 0; i < result->num_hidden_layers(); ++i) sliding[i] = (i + 1) % pattern != 0;
  set_sliding_layers(config, read_layer_types(config, result->num_hidden_layers()).value_or(sliding), result);
}

void read_gemma3_ropes(const ConfigReader& config, DecoderConfig* result) {
  const double full = config.positive_number("rope_theta", 1000000);
  const double sliding = config.positive_number("rope_local_base_freq", 10000);
  read_rope_by_layer_type(config, full, sliding, result);
  // Transformers 4 reads the outer keys, Transformers 5 those of rope_parameters.
  const auto check = [&](const char* key, double outer, double inner) {
    if (config.find(key) != nullptr && outer != inner) {
      config.refuse(key, fmt::format("the rope_theta of rope_parameters, {}", inner));
    }
  };
  check("rope_theta", full, result->rope.rope_theta);
  check("rope_local_base_freq", sliding, result->sliding_rope->rope_theta);
}

}  // namespace

constexpr ModelFamily kGemmaFamily{
    .model_type = "gemma",
    .max_position_embeddings = 8192,
    .num_key_value_heads = 16,
    .head_dim = 256,
    .tie_word_embeddings = true,
    .pad_token_id = 0,
    .keys = "hidden_act hidden_activation use_bidirectional_attention",
    .bias_keys = "self_attn.=attention_bias",
    .read = read_gemma,
};

constexpr ModelFamily kGemma2Family{
    .model_type = "gemma2",
    .max_position_embeddings = 8192,
    .num_key_value_heads = 4,
    .head_dim = 256,
    .tie_word_embeddings = true,
    .pad_token_id = 0,
    // hidden_act is of files of Transformers 4, which ignores it.
    .keys =
        "attn_logit_softcapping cache_implementation final_logit_softcapping hidden_act hidden_activation "
        "query_pre_attn_scalar use_bidirectional_attention",
    .bias_keys = "self_attn.=attention_bias",
    .read = read_gemma2,
};

constexpr ModelFamily kGemma3Family{
    .model_type = "gemma3_text",
    .max_position_embeddings = 131072,
    .num_key_value_heads = 4,
    .head_dim = 256,
    .tie_word_embeddings = true,
    .pad_token_id = 0,
    .keys =
        "attn_logit_softcapping cache_implementation final_logit_softcapping hidden_activation "
        "query_pre_attn_scalar rope_local_base_freq sliding_window_pattern use_bidirectional_attention",
    .bias_keys = "self_attn.=attention_bias",
    .read = read_gemma3,
    .read_rope = read_gemma3_ropes,
};

}  // namespace espalier
