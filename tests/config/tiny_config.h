// SPDX-License-Identifier: Apache-2.0
// The config.json of tiny models of every family.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

namespace espalier::testing {

/// config.json of a tiny model as Transformers 5 writes it; `changes` replace or add keys.
inline nlohmann::ordered_json tiny_config(
    const std::string& model_type, const nlohmann::ordered_json& changes = nlohmann::ordered_json::object()) {
  nlohmann::ordered_json config = {
      {"architectures", {"ForCausalLM"}},
      {"model_type", model_type},
      {"vocab_size", 37},
      {"hidden_size", 16},
      {"intermediate_size", 24},
      {"num_hidden_layers", 2},
      {"num_attention_heads", 4},
      {"num_key_value_heads", 2},
      {"head_dim", 6},
      {"max_position_embeddings", 128},
      {"hidden_act", "silu"},
      {"rms_norm_eps", 1e-5},
      {"attention_dropout", 0.0},
      {"tie_word_embeddings", false},
      {"dtype", "float32"},
      {"rope_parameters", {{"rope_theta", 500.0}, {"rope_type", "default"}}},
  };
  config.update(changes);
  return config;
}

}  // namespace espalier::testing
