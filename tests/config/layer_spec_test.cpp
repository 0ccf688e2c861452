// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/layer_spec.h"

#include <gtest/gtest.h>

#include <map>

#include "tests/config/tiny_config.h"

namespace espalier {
namespace {

using testing::tiny_config;

std::vector<std::string> names_of(const std::vector<ParameterShape>& parameters) {
  std::vector<std::string> names;
  for (const ParameterShape& parameter : parameters) names.push_back(parameter.name);
  return names;
}

TEST(LayerSpec, LayersOfAConfig) {
  const DecoderConfig config = parse_config(tiny_config("qwen3"), "config.json");
  const LayerSpec layer{
      AttentionSpec{
          .num_attention_heads = 4, .num_key_value_heads = 2, .head_dim = 6, .query_key_norm = true},
      DenseMlpSpec{.intermediate_size = 24}};
  EXPECT_EQ(config.layers, (std::vector<LayerSpec>{layer, layer}));
}

// Layers that differ have parameters of different sizes, in the order of the layers.
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
      expected.push_back(layer_prefix({}, static_cast<int64_t>(i)) + name);
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

// The names and shapes of Transformers' Olmo3DecoderLayer and of gpt-oss' sinks.
TEST(LayerSpec, NormsOfOutputsAndSinks) {
  const LayerSpec layer{AttentionSpec{.num_attention_heads = 4,
                                      .num_key_value_heads = 2,
                                      .head_dim = 4,
                                      .query_key_norm = true,
                                      .query_key_norm_over_heads = true,
                                      .sinks = true},
                        DenseMlpSpec{.intermediate_size = 6}, /*norm_inputs=*/false, /*norm_outputs=*/true};
  std::map<std::string, std::vector<int64_t>> shapes;
  for (const ParameterShape& parameter : layer_parameters(layer, 8)) shapes[parameter.name] = parameter.shape;
  EXPECT_EQ(shapes.at("self_attn.q_norm.weight"), std::vector<int64_t>{16});
  EXPECT_EQ(shapes.at("self_attn.k_norm.weight"), std::vector<int64_t>{8});
  EXPECT_EQ(shapes.at("self_attn.sinks"), std::vector<int64_t>{4});
  EXPECT_FALSE(shapes.contains("input_layernorm.weight"));
  EXPECT_TRUE(shapes.contains("post_attention_layernorm.weight"));
  EXPECT_TRUE(shapes.contains("post_feedforward_layernorm.weight"));
}

// The names of Transformers' Gemma3DecoderLayer and Phi3DecoderLayer.
TEST(LayerSpec, NormsOfInputsAndOutputsAndFusedMaps) {
  const LayerSpec layer{
      AttentionSpec{.num_attention_heads = 4, .num_key_value_heads = 2, .head_dim = 4, .fused = true},
      DenseMlpSpec{.intermediate_size = 6, .names = {.gate = "gate_up_proj", .up = "", .down = "down_proj"}},
      /*norm_inputs=*/true, /*norm_outputs=*/true};
  const std::vector<ParameterShape> parameters = layer_parameters(layer, 8);
  EXPECT_EQ(names_of(parameters),
            (std::vector<std::string>{
                "self_attn.qkv_proj.weight", "self_attn.o_proj.weight", "mlp.gate_up_proj.weight",
                "mlp.down_proj.weight", "input_layernorm.weight", "post_attention_layernorm.weight",
                "pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"}));
  EXPECT_EQ(parameters[0].shape, (std::vector<int64_t>{32, 8}));
  EXPECT_EQ(parameters[2].shape, (std::vector<int64_t>{12, 8}));
}

TEST(LayerSpec, LayersOfAConfigHaveTheirWindows) {
  const DecoderConfig config = parse_config(
      tiny_config("qwen3", {{"use_sliding_window", true}, {"sliding_window", 9}, {"max_window_layers", 1}}),
      "config.json");
  const ModelSpec& spec = config;
  EXPECT_EQ(std::get<AttentionSpec>(spec.layers[0].mixer).sliding_window, 0);
  EXPECT_EQ(std::get<AttentionSpec>(spec.layers[1].mixer).sliding_window, 9);
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
  EXPECT_TRUE(differs([](AttentionSpec& a, DenseMlpSpec&) { a.rotary_dim = 2; }));
  EXPECT_TRUE(differs([](AttentionSpec& a, DenseMlpSpec&) { a.query_key_norm_over_heads = true; }));
  EXPECT_TRUE(differs([](AttentionSpec& a, DenseMlpSpec&) { a.sliding_window = 8; }));
  EXPECT_TRUE(differs([](AttentionSpec& a, DenseMlpSpec&) { a.sinks = true; }));
  EXPECT_TRUE(differs([](AttentionSpec& a, DenseMlpSpec&) { a.output_gate = true; }));
  EXPECT_TRUE(differs([](AttentionSpec& a, DenseMlpSpec&) { a.rotary = false; }));
  EXPECT_TRUE(differs([](AttentionSpec& a, DenseMlpSpec&) { a.attention_multiplier = 0.5; }));
  EXPECT_TRUE(differs([](AttentionSpec& a, DenseMlpSpec&) { a.softcap = 50; }));
  EXPECT_TRUE(differs([](AttentionSpec& a, DenseMlpSpec&) { a.fused = true; }));
  EXPECT_TRUE(differs([](AttentionSpec& a, DenseMlpSpec&) { a.rotary_interleaved = true; }));
  EXPECT_TRUE(differs([](AttentionSpec&, DenseMlpSpec& m) { m.names.up = ""; }));
  EXPECT_FALSE(differs([](AttentionSpec&, DenseMlpSpec& m) { m.names.down = "w2"; }));
  EXPECT_TRUE(differs([](AttentionSpec&, DenseMlpSpec& m) { m.activation = Activation::kGeluTanh; }));
  LayerSpec other = layer;
  other.norm_outputs = true;
  EXPECT_NE(to_json(other), to_json(layer));
  LayerSpec outputs_alone = other;
  outputs_alone.norm_inputs = false;
  EXPECT_NE(to_json(other), to_json(outputs_alone));
  other = layer;
  other.zero_centered_norm = true;
  EXPECT_NE(to_json(other), to_json(layer));
  EXPECT_TRUE(differs([](AttentionSpec&, DenseMlpSpec& m) { m.intermediate_size = 7; }));
  EXPECT_TRUE(differs([](AttentionSpec&, DenseMlpSpec& m) { m.bias = true; }));
  EXPECT_TRUE(differs([](AttentionSpec&, DenseMlpSpec& m) { m.names.gate = ""; }));
  EXPECT_NE(to_json({NoMixer(), layer.mlp}), to_json(layer));
}

std::vector<std::string> names_in_layer(const std::string& type) {
  const ModelSpec spec = parse_config(tiny_config(type), "config.json");
  EXPECT_TRUE(std::holds_alternative<DenseMlpSpec>(spec.layers[0].mlp));
  EXPECT_TRUE(std::holds_alternative<MoeSpec>(spec.layers[1].mlp));
  std::vector<std::string> names;
  for (const std::string& name : names_of(layer_parameters(spec.layers[1], spec.hidden_size))) {
    if (name.starts_with("mlp.")) names.push_back(name);
  }
  return names;
}

TEST(LayerSpec, ExpertsHaveTheNamesOfTheCheckpoint) {
  std::vector<std::string> names = names_in_layer("qwen3_moe");
  ASSERT_EQ(names.size(), 1 + 5 * 3u);
  names.resize(5);
  EXPECT_EQ(names, (std::vector<std::string>{"mlp.gate.weight", "mlp.experts.0.gate_proj.weight",
                                             "mlp.experts.0.up_proj.weight", "mlp.experts.0.down_proj.weight",
                                             "mlp.experts.1.gate_proj.weight"}));
  names = names_in_layer("glm4_moe");
  ASSERT_EQ(names.size(), 1 + 6 * 3 + 3u);
  EXPECT_EQ(names.back(), "mlp.shared_experts.down_proj.weight");
  const std::vector<ParameterShape> buffers =
      buffer_shapes(parse_config(tiny_config("glm4_moe"), "config.json"));
  ASSERT_EQ(names_of(buffers), std::vector<std::string>{"model.layers.1.mlp.gate.e_score_correction_bias"});
  EXPECT_EQ(buffers[0].shape, std::vector<int64_t>{6});
  EXPECT_TRUE(buffer_shapes(parse_config(tiny_config("qwen3_moe"), "config.json")).empty());
}

TEST(LayerSpec, JsonOfStateSpacesIsEqualForEqualOnesOnly) {
  const SsmSpec ssm{.num_heads = 4, .head_dim = 3, .state_size = 5, .conv_kernel = 4};
  const auto differs = [&](const auto& change) {
    SsmSpec other = ssm;
    change(other);
    return to_json(LayerSpec{other, NoMlp{}}) != to_json(LayerSpec{ssm, NoMlp{}});
  };
  EXPECT_FALSE(differs([](SsmSpec&) {}));
  const nlohmann::ordered_json json = to_json(LayerSpec{ssm, NoMlp{}});
  EXPECT_EQ(nlohmann::ordered_json::parse(json.dump()), json);  // what a file has of it is the same
  EXPECT_TRUE(differs([](SsmSpec& s) { s.num_heads = 2; }));
  EXPECT_TRUE(differs([](SsmSpec& s) { s.head_dim = 2; }));
  EXPECT_TRUE(differs([](SsmSpec& s) { s.state_size = 2; }));
  EXPECT_TRUE(differs([](SsmSpec& s) { s.n_groups = 2; }));
  EXPECT_TRUE(differs([](SsmSpec& s) { s.conv_kernel = 2; }));
  EXPECT_TRUE(differs([](SsmSpec& s) { s.use_bias = true; }));
  EXPECT_TRUE(differs([](SsmSpec& s) { s.use_conv_bias = false; }));
  EXPECT_TRUE(differs([](SsmSpec& s) { s.least_time_step = 0.5; }));
  EXPECT_TRUE(differs([](SsmSpec& s) { s.most_time_step = 0.5; }));
  EXPECT_TRUE(differs([](SsmSpec& s) { s.name = "mamba"; }));
  EXPECT_NE(to_json(LayerSpec{ssm, NoMlp{}}), to_json(LayerSpec{ssm, DenseMlpSpec{}}));
}

TEST(LayerSpec, JsonOfExpertsIsEqualForEqualOnesOnly) {
  const AttentionSpec attention{.num_attention_heads = 2, .num_key_value_heads = 1, .head_dim = 4};
  const MoeSpec moe{.num_experts = 8, .num_experts_per_tok = 2, .moe_intermediate_size = 6};
  const auto differs = [&](const auto& change) {
    MoeSpec other = moe;
    change(other);
    return to_json(LayerSpec{attention, other}) != to_json(LayerSpec{attention, moe});
  };
  EXPECT_FALSE(differs([](MoeSpec&) {}));
  EXPECT_TRUE(differs([](MoeSpec& m) { m.num_experts = 9; }));
  EXPECT_TRUE(differs([](MoeSpec& m) { m.num_experts_per_tok = 3; }));
  EXPECT_TRUE(differs([](MoeSpec& m) { m.moe_intermediate_size = 7; }));
  EXPECT_TRUE(differs([](MoeSpec& m) { m.scores = RouterScores::kSigmoid; }));
  EXPECT_TRUE(differs([](MoeSpec& m) { m.scores = RouterScores::kSoftmaxOverChosen; }));
  EXPECT_TRUE(differs([](MoeSpec& m) { m.norm_topk_prob = true; }));
  EXPECT_TRUE(differs([](MoeSpec& m) { m.routed_scaling_factor = 2; }));
  EXPECT_TRUE(differs([](MoeSpec& m) { m.correction_bias = true; }));
  EXPECT_TRUE(differs([](MoeSpec& m) { m.n_group = 2; }));
  EXPECT_TRUE(differs([](MoeSpec& m) { m.topk_group = 2; }));
  EXPECT_TRUE(differs([](MoeSpec& m) { m.shared_intermediate_size = 3; }));
  EXPECT_TRUE(differs([](MoeSpec& m) { m.names.up = ""; }));
  EXPECT_TRUE(differs([](MoeSpec& m) { m.names.gate = ""; }));
  EXPECT_TRUE(differs([](MoeSpec& m) { m.clamped_swiglu = ClampedSwiglu(); }));
  const auto clamped = [&](const ClampedSwiglu& activation) {
    MoeSpec other = moe;
    other.clamped_swiglu = activation;
    return to_json(LayerSpec{attention, other});
  };
  EXPECT_NE(clamped({.swiglu_alpha = 1}), clamped({}));
  EXPECT_NE(clamped({.swiglu_limit = 1}), clamped({}));
}

}  // namespace
}  // namespace espalier
