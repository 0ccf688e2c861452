// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/families/gemma_keys.h"

#include <cmath>

namespace espalier {

LayerSpec read_gemma_layer(const ConfigReader& config, const CommonParts& common, const char* act_key,
                           DecoderConfig* result) {
  auto [attention, mlp] = common;
  read_biases(config, &attention);
  const std::string activation = config.text(act_key);
  if (!activation.empty() && activation != "gelu_pytorch_tanh") {
    config.refuse(act_key, "\"gelu_pytorch_tanh\"");
  }
  mlp.activation = Activation::kGeluTanh;
  if (config.boolean("use_bidirectional_attention", false)) {
    config.refuse("use_bidirectional_attention", "false");
  }
  result->embedding_multiplier = std::sqrt(static_cast<double>(result->hidden_size));
  result->round_embedding_multiplier = true;
  return {.mixer = attention, .mlp = mlp, .zero_centered_norm = true};
}

}  // namespace espalier
