// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/layer_spec.h"

#include <gtest/gtest.h>

#include "tests/config/tiny_config.h"

namespace espalier {
namespace {

using testing::tiny_config;

std::vector<std::string> names_of(const std::vector<ParameterShape>& parameters) {
  std::vector<std::string> names;
  for (const ParameterShape& parameter : parameters) names.push_back(parameter.name);
  return names;
}

TEST(LayerSpec, SpecOfAConfig) {
  const DecoderConfig config = parse_config(tiny_config("qwen3"), "config.json");
  const ModelSpec spec = model_spec(config);
  EXPECT_EQ(spec.hidden_size, config.hidden_size);
  EXPECT_EQ(spec.vocab_size, config.vocab_size);
  EXPECT_EQ(spec.tie_word_embeddings, config.tie_word_embeddings);
  ASSERT_EQ(static_cast<int64_t>(spec.layers.size()), config.num_hidden_layers);
  const auto& attention = std::get<AttentionSpec>(spec.layers[0].mixer);
  EXPECT_EQ(attention.num_attention_heads, config.num_attention_heads);
  EXPECT_EQ(attention.num_key_value_heads, config.num_key_value_heads);
  EXPECT_EQ(attention.head_dim, config.head_dim);
  EXPECT_TRUE(attention.query_key_norm);
  EXPECT_EQ(std::get<DenseMlpSpec>(spec.layers[0].mlp).intermediate_size, config.intermediate_size);
}

// Layers that differ have parameters of their own sizes, in the order of the layers.
TEST(LayerSpec, ParametersFollowEachLayer) {
  const LayerSpec plain{AttentionSpec{.num_attention_heads = 2, .num_key_value_heads = 1, .head_dim = 4},
                        DenseMlpSpec{.intermediate_size = 6}};
  LayerSpec biased = plain;
  std::get<AttentionSpec>(biased.mixer).bias = true;
  std::get<DenseMlpSpec>(biased.mlp).intermediate_size = 12;
  const std::vector<ParameterShape> all = parameter_shapes(
      ModelSpec{.hidden_size = 8, .vocab_size = 5, .tie_word_embeddings = true, .layers = {plain, biased}});
  std::vector<std::string> expected = {"model.embed_tokens.weight"};
  for (size_t i = 0; i < 2; ++i) {
    for (const std::string& name : names_of(layer_parameters(i == 0 ? plain : biased, 8))) {
      expected.push_back(layer_prefix(static_cast<int64_t>(i)) + name);
    }
  }
  expected.emplace_back("model.norm.weight");
  EXPECT_EQ(names_of(all), expected);
  EXPECT_EQ(all.size(), 1 + 9 + 12 + 1u);
  for (const ParameterShape& parameter : all) {
    if (parameter.name == "model.layers.0.mlp.down_proj.weight") {
      EXPECT_EQ(parameter.shape, (std::vector<int64_t>{8, 6}));
    }
    if (parameter.name == "model.layers.1.mlp.down_proj.weight") {
      EXPECT_EQ(parameter.shape, (std::vector<int64_t>{8, 12}));
    }
  }
}

TEST(LayerSpec, JsonIsEqualForEqualLayersOnly) {
  const LayerSpec layer{AttentionSpec{.num_attention_heads = 2, .num_key_value_heads = 1, .head_dim = 4},
                        DenseMlpSpec{.intermediate_size = 6}};
  EXPECT_EQ(to_json(layer), to_json(LayerSpec(layer)));
  const auto differs = [&](const auto& change) {
    LayerSpec other = layer;
    change(std::get<AttentionSpec>(other.mixer), std::get<DenseMlpSpec>(other.mlp));
    return to_json(other) != to_json(layer);
  };
  EXPECT_TRUE(differs([](AttentionSpec& a, DenseMlpSpec&) { a.num_attention_heads = 4; }));
  EXPECT_TRUE(differs([](AttentionSpec& a, DenseMlpSpec&) { a.num_key_value_heads = 2; }));
  EXPECT_TRUE(differs([](AttentionSpec& a, DenseMlpSpec&) { a.head_dim = 8; }));
  EXPECT_TRUE(differs([](AttentionSpec& a, DenseMlpSpec&) { a.bias = true; }));
  EXPECT_TRUE(differs([](AttentionSpec& a, DenseMlpSpec&) { a.output_bias = true; }));
  EXPECT_TRUE(differs([](AttentionSpec& a, DenseMlpSpec&) { a.query_key_norm = true; }));
  EXPECT_TRUE(differs([](AttentionSpec&, DenseMlpSpec& m) { m.intermediate_size = 7; }));
  EXPECT_TRUE(differs([](AttentionSpec&, DenseMlpSpec& m) { m.bias = true; }));
}

}  // namespace
}  // namespace espalier
