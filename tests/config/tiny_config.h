// SPDX-License-Identifier: Apache-2.0
// The config.json of tiny models of every family.
#pragma once

#include <string>
#include <type_traits>
#include <vector>

#include <nlohmann/json.hpp>

#include "espalier/config/config.h"

namespace espalier::testing {

/// The keys of the mixture of experts of tiny models: a dense layer, then one of experts (gpt_oss: two).
inline nlohmann::ordered_json tiny_moe_keys(const std::string& model_type) {
  if (model_type == "qwen3_moe") {
    return {{"num_experts", 5},
            {"num_experts_per_tok", 2},
            {"moe_intermediate_size", 7},
            {"norm_topk_prob", true},
            {"decoder_sparse_step", 2}};
  }
  if (model_type == "gpt_oss") {
    return {
        {"num_local_experts", 5}, {"num_experts_per_tok", 2}, {"sliding_window", 3}, {"swiglu_limit", 0.5}};
  }
  return {{"n_routed_experts", 6},
          {"num_experts_per_tok", 2},
          {"moe_intermediate_size", 7},
          {"n_shared_experts", 2},
          {"n_group", 3},
          {"topk_group", 2},
          {"routed_scaling_factor", 1.25},
          {"use_qk_norm", true},
          {"first_k_dense_replace", 1},
          {"head_dim", 8}};
}

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
  if (model_type.ends_with("_moe") || model_type == "gpt_oss") config.update(tiny_moe_keys(model_type));
  config.update(changes);
  return config;
}

/// The layers that have such a mixer or MLP, ascending.
template <typename Part>
std::vector<int64_t> layers_with(const ModelSpec& spec) {
  const auto is_it = [](const auto& part) { return std::is_same_v<std::decay_t<decltype(part)>, Part>; };
  std::vector<int64_t> layers;
  for (int64_t i = 0; i < spec.num_hidden_layers(); ++i) {
    if (std::visit(is_it, spec.layers[i].mixer) || std::visit(is_it, spec.layers[i].mlp)) layers.push_back(i);
  }
  return layers;
}

/// The windows of layers that all have attention; 0: none.
inline std::vector<int64_t> windows_of(const ModelSpec& spec) {
  std::vector<int64_t> windows;
  for (const LayerSpec& layer : spec.layers) {
    windows.push_back(std::get<AttentionSpec>(layer.mixer).sliding_window);
  }
  return windows;
}

/// The model of this config.json, in a folder FOLDER.
inline DecoderConfig parse(const nlohmann::ordered_json& json) {
  return parse_config(json, "FOLDER/config.json");
}

}  // namespace espalier::testing
