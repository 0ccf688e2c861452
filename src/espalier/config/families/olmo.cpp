// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/families/family.h"
#include "espalier/config/sliding_window.h"

namespace espalier {
namespace {

// Norms come after attention and MLP, and norms of q and k are over all heads at once.
LayerSpec read_olmo_layer(const ConfigReader& config, const CommonParts& common) {
  LayerSpec layer{common.attention, common.mlp, /*norm_inputs=*/false, /*norm_outputs=*/true};
  auto& attention = std::get<AttentionSpec>(layer.mixer);
  read_biases(config, &attention);
  attention.query_key_norm = attention.query_key_norm_over_heads = true;
  return layer;
}

void read_olmo2(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  result->layers.assign(result->layers.size(), read_olmo_layer(config, common));
  refuse_sliding_windows(config, result->num_hidden_layers());
}

// Without layer_types, three of four layers have the window.
void read_olmo3(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  result->layers.assign(result->layers.size(), read_olmo_layer(config, common));
  if (config.find("use_sliding_window") != nullptr) {
    config.refuse("use_sliding_window", "no such key: layer_types decides in olmo3");
  }
  std::vector<bool> sliding(result->num_hidden_layers());
  for (int64_t i = 0; i < result->num_hidden_layers(); ++i) sliding[i] = (i + 1) % 4 != 0;
  set_sliding_layers(config, read_layer_types(config, result->num_hidden_layers()).value_or(sliding), result);
}

void read_olmo3_ropes(const ConfigReader& config, DecoderConfig* result) {
  constexpr double kTheta = 500000;
  // A rope_theta outside of rope_parameters applies to all layers in Transformers 4, and to layers without a
  // window in Transformers 5.
  if (config.find("rope_theta") != nullptr && *config.find("rope_theta") != kTheta) {
    config.refuse("rope_theta",
                  "500000, or rope_theta in rope_parameters.full_attention and "
                  "rope_parameters.sliding_attention");
  }
  read_rope_by_layer_type(config, kTheta, kTheta, result);
}

}  // namespace

constexpr ModelFamily kOlmo2Family{
    .model_type = "olmo2",
    .max_position_embeddings = 2048,
    .rms_norm_eps = 1e-5,
    .pad_token_id = 1,
    .bias_keys = "self_attn.=attention_bias",
    .read = read_olmo2,
};

constexpr ModelFamily kOlmo3Family{
    .model_type = "olmo3",
    .max_position_embeddings = 2048,
    .rms_norm_eps = 1e-5,
    .pad_token_id = 1,
    .bias_keys = "self_attn.=attention_bias",
    .read = read_olmo3,
    .read_rope = read_olmo3_ropes,
};

}  // namespace espalier
