// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "espalier/config/families/gemma_keys.h"
#include "espalier/config/sliding_window.h"

namespace espalier {

namespace {

// hidden_activation is what older versions of Transformers read instead of hidden_act.
void read_gemma(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  const std::string older = config.text("hidden_activation");
  if (!older.empty() && older != "gelu_pytorch_tanh") {
    config.refuse("hidden_activation", "\"gelu_pytorch_tanh\" or null");
  }
  refuse_sliding_windows(config, result->num_hidden_layers());
  result->layers.assign(result->layers.size(), read_gemma_layer(config, common, "hidden_act", result));
}

constexpr auto kGemmaKeys =
    std::to_array<std::string_view>({"hidden_act", "hidden_activation", "use_bidirectional_attention"});

}  // namespace

constexpr ModelFamily kGemmaFamily{
    .model_type = "gemma",
    .max_position_embeddings = 8192,
    .num_key_value_heads = 16,
    .head_dim = 256,
    .tie_word_embeddings = true,
    .pad_token_id = 0,
    .keys = kGemmaKeys,
    .read = read_gemma,
};

}  // namespace espalier
