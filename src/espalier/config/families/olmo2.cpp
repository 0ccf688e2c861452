// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/families/family.h"
#include "espalier/config/sliding_window.h"

namespace espalier {

namespace {

// Norms come after attention and MLP, and norms of q and k are over all heads at once.
void read_olmo2(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  LayerSpec layer{common.attention, common.mlp, /*norm_inputs=*/false, /*norm_outputs=*/true};
  auto& attention = std::get<AttentionSpec>(layer.mixer);
  read_biases(config, &attention);
  refuse_sliding_windows(config, result->num_hidden_layers());
  attention.query_key_norm = attention.query_key_norm_over_heads = true;
  result->layers.assign(result->layers.size(), layer);
}

}  // namespace

constexpr ModelFamily kOlmo2Family{
    .model_type = "olmo2",
    .max_position_embeddings = 2048,
    .num_key_value_heads = 0,
    .head_dim = 0,
    .rms_norm_eps = 1e-5,
    .pad_token_id = 1,
    .read = read_olmo2,
};

}  // namespace espalier
