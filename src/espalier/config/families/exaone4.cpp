// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/families/family.h"
#include "espalier/config/sliding_window.h"

namespace espalier {
namespace {

// Norms come after attention and MLP. Where some layers have a window, the others have no positions. Without
// layer_types all but every sliding_window_pattern-th have it.
void read_exaone4(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  refuse_biases(config);
  if (config.find("use_sliding_window") != nullptr) {
    config.refuse("use_sliding_window", "no such key: layer_types and sliding_window decide in exaone4");
  }
  LayerSpec layer{common.attention, common.mlp, /*norm_inputs=*/false, /*norm_outputs=*/true};
  std::get<AttentionSpec>(layer.mixer).query_key_norm = true;
  result->layers.assign(result->layers.size(), layer);
  const bool uses_window = has_window(config);
  std::vector<bool> sliding(result->layers.size());
  if (uses_window && config.find("layer_types") == nullptr) {
    const int64_t pattern = config.positive_integer("sliding_window_pattern", kMostLayers, 4);
    for (int64_t i = 0; i < result->num_hidden_layers(); ++i) sliding[i] = (i + 1) % pattern != 0;
  }
  read_window(config, uses_window, sliding, result);
  for (LayerSpec& each : result->layers) {
    auto& attention = std::get<AttentionSpec>(each.mixer);
    attention.rotary = !uses_window || attention.sliding_window > 0;
  }
}

}  // namespace

constexpr ModelFamily kExaone4Family{
    .model_type = "exaone4",
    .max_position_embeddings = 2048,
    .num_key_value_heads = 32,
    .rms_norm_eps = 1e-5,
    .keys = "sliding_window_pattern",
    .read = read_exaone4,
};

}  // namespace espalier
