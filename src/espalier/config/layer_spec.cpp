// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/layer_spec.h"

#include <utility>

namespace espalier {
namespace {

using Shapes = std::vector<ParameterShape>;

void append_projection(const std::string& name, int64_t out, int64_t in, bool bias, Shapes* shapes) {
  shapes->push_back({name + ".weight", {out, in}});
  if (bias) shapes->push_back({name + ".bias", {out}});
}

void append_parameters(const AttentionSpec& attention, int64_t hidden, Shapes* shapes) {
  const int64_t query = attention.num_attention_heads * attention.head_dim;
  const int64_t key = attention.num_key_value_heads * attention.head_dim;
  append_projection("self_attn.q_proj", query, hidden, attention.bias, shapes);
  append_projection("self_attn.k_proj", key, hidden, attention.bias, shapes);
  append_projection("self_attn.v_proj", key, hidden, attention.bias, shapes);
  append_projection("self_attn.o_proj", hidden, query, attention.output_bias, shapes);
  if (attention.query_key_norm) {
    shapes->push_back({"self_attn.q_norm.weight", {attention.head_dim}});
    shapes->push_back({"self_attn.k_norm.weight", {attention.head_dim}});
  }
}

void append_parameters(const DenseMlpSpec& mlp, int64_t hidden, Shapes* shapes) {
  append_projection("mlp.gate_proj", mlp.intermediate_size, hidden, mlp.bias, shapes);
  append_projection("mlp.up_proj", mlp.intermediate_size, hidden, mlp.bias, shapes);
  append_projection("mlp.down_proj", hidden, mlp.intermediate_size, mlp.bias, shapes);
}

nlohmann::ordered_json to_json(const AttentionSpec& attention) {
  return {{"type", "attention"},
          {"num_attention_heads", attention.num_attention_heads},
          {"num_key_value_heads", attention.num_key_value_heads},
          {"head_dim", attention.head_dim},
          {"attention_bias", attention.bias},
          {"attention_output_bias", attention.output_bias},
          {"query_key_norm", attention.query_key_norm}};
}

nlohmann::ordered_json to_json(const DenseMlpSpec& mlp) {
  return {{"type", "dense"}, {"intermediate_size", mlp.intermediate_size}, {"mlp_bias", mlp.bias}};
}

}  // namespace

ModelSpec model_spec(const DecoderConfig& config) {
  const LayerSpec layer{AttentionSpec{.num_attention_heads = config.num_attention_heads,
                                      .num_key_value_heads = config.num_key_value_heads,
                                      .head_dim = config.head_dim,
                                      .bias = config.attention_bias,
                                      .output_bias = config.attention_output_bias,
                                      .query_key_norm = config.query_key_norm},
                        DenseMlpSpec{.intermediate_size = config.intermediate_size, .bias = config.mlp_bias}};
  return {.hidden_size = config.hidden_size,
          .vocab_size = config.vocab_size,
          .tie_word_embeddings = config.tie_word_embeddings,
          .layers = std::vector<LayerSpec>(config.num_hidden_layers, layer)};
}

nlohmann::ordered_json to_json(const LayerSpec& layer) {
  const auto part = [](const auto& alternative) { return to_json(alternative); };
  return {{"mixer", std::visit(part, layer.mixer)}, {"mlp", std::visit(part, layer.mlp)}};
}

std::vector<ParameterShape> layer_parameters(const LayerSpec& layer, int64_t hidden_size) {
  Shapes shapes;
  const auto append = [&](const auto& part) { append_parameters(part, hidden_size, &shapes); };
  std::visit(append, layer.mixer);
  std::visit(append, layer.mlp);
  shapes.push_back({"input_layernorm.weight", {hidden_size}});
  shapes.push_back({"post_attention_layernorm.weight", {hidden_size}});
  return shapes;
}

std::string layer_prefix(int64_t index) {
  return "model.layers." + std::to_string(index) + ".";
}

std::vector<ParameterShape> parameter_shapes(const ModelSpec& spec) {
  Shapes shapes{{"model.embed_tokens.weight", {spec.vocab_size, spec.hidden_size}}};
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    const std::string prefix = layer_prefix(static_cast<int64_t>(i));
    for (ParameterShape& parameter : layer_parameters(spec.layers[i], spec.hidden_size)) {
      shapes.push_back({prefix + parameter.name, std::move(parameter.shape)});
    }
  }
  shapes.push_back({"model.norm.weight", {spec.hidden_size}});
  if (!spec.tie_word_embeddings) {
    shapes.push_back({"lm_head.weight", {spec.vocab_size, spec.hidden_size}});
  }
  return shapes;
}

std::vector<ParameterShape> parameter_shapes(const DecoderConfig& config) {
  return parameter_shapes(model_spec(config));
}

}  // namespace espalier
