// Tiny decoders of every family.
#pragma once

#include <ATen/ATen.h>

#include <nlohmann/json.hpp>

#include <string>
#include <utility>
#include <vector>

#include "espalier/model/config.h"
#include "espalier/model/decoder.h"

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

/// A decoder of that config with random parameters, norms and biases included.
inline Decoder tiny_decoder(const nlohmann::ordered_json& json, at::ScalarType dtype, uint64_t seed) {
  DecoderConfig config = parse_config(json, "config.json");
  at::manual_seed(seed);
  std::vector<Parameter> parameters;
  for (const ParameterShape& shape : parameter_shapes(config)) {
    at::Tensor value = at::randn(shape.shape, at::kDouble) * 0.3;
    if (shape.name.find("norm") != std::string::npos) value += 1;
    parameters.push_back({shape.name, value.to(dtype).set_requires_grad(true)});
  }
  return Decoder(std::move(config), std::move(parameters));
}

/// Ordinary causal attention over one sequence.
inline at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   double softmax_scale) {
  const int64_t group = q.size(1) / k.size(1);
  const at::Tensor keys = k.repeat_interleave(group, 1), values = v.repeat_interleave(group, 1);
  const at::Tensor scores = at::einsum("ihd,jhd->hij", {q, keys}) * softmax_scale;
  const at::Tensor hidden = at::ones({q.size(0), q.size(0)}, at::kBool).triu(1);
  return at::einsum("hij,jhd->ihd", {at::softmax(scores.masked_fill(hidden, -INFINITY), -1), values});
}

}  // namespace espalier::testing
