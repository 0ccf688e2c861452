// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/families/gated_delta_keys.h"

#include <fmt/format.h>

namespace espalier {
namespace {

/// Sets the mixer on the layers that layer_types or full_attention_interval names.
void set_delta_layers(const ConfigReader& config, const GatedDeltaSpec& mixer, DecoderConfig* result) {
  const nlohmann::json* types = config.find("layer_types");
  const int64_t interval = config.positive_integer("full_attention_interval", kMostLayers, 4);
  for (int64_t layer = 0; layer < result->num_hidden_layers(); ++layer) {
    bool is_linear = (layer + 1) % interval != 0;
    if (types != nullptr) {
      const auto& type =
          types->is_array() && layer < static_cast<int64_t>(types->size()) ? (*types)[layer] : *types;
      is_linear = type == "linear_attention";
      if (!is_linear && type != "full_attention") {
        config.refuse("layer_types", "\"linear_attention\" or \"full_attention\" for each layer");
      }
    }
    if (is_linear) result->layers[layer].mixer = mixer;
  }
  if (types != nullptr && static_cast<int64_t>(types->size()) != result->num_hidden_layers()) {
    config.refuse("layer_types",
                  fmt::format("{} entries, one for each of num_hidden_layers", result->num_hidden_layers()));
  }
}

}  // namespace

void read_gated_delta_layers(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  LayerSpec layer{.mixer = common.attention, .mlp = common.mlp, .zero_centered_norm = true};
  auto& attention = std::get<AttentionSpec>(layer.mixer);
  read_biases(config, &attention);
  if (config.boolean("use_sliding_window", false)) config.refuse("use_sliding_window", "false");
  if (config.find("sliding_window") != nullptr) config.refuse("sliding_window", "null");
  if (!config.boolean("attn_output_gate", true)) config.refuse("attn_output_gate", "true");
  attention.query_key_norm = attention.output_gate = true;
  result->layers.assign(result->layers.size(), layer);
  GatedDeltaSpec sizes;
  sizes.linear_num_key_heads = config.positive_integer("linear_num_key_heads", kMostHeads, 16);
  sizes.linear_num_value_heads = config.positive_integer("linear_num_value_heads", kMostHeads, 32);
  if (sizes.linear_num_value_heads % sizes.linear_num_key_heads != 0) {
    config.refuse("linear_num_value_heads",
                  fmt::format("a multiple of linear_num_key_heads, {}", sizes.linear_num_key_heads));
  }
  sizes.linear_key_head_dim = config.positive_integer("linear_key_head_dim", kMostHeadDim, 128);
  sizes.linear_value_head_dim = config.positive_integer("linear_value_head_dim", kMostHeadDim, 128);
  sizes.linear_conv_kernel_dim = config.positive_integer("linear_conv_kernel_dim", kMostConvolution, 4);
  set_delta_layers(config, sizes, result);
}

}  // namespace espalier
