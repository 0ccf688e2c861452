// SPDX-License-Identifier: Apache-2.0
// The family qwen3_5: layers of two kinds, and text decoders inside larger models.
#include <gtest/gtest.h>

#include "espalier/base/check.h"
#include "espalier/config/layer_spec.h"
#include "tests/base/message_of.h"
#include "tests/config/tiny_config.h"

namespace espalier {
namespace {

using testing::message_of;
using testing::parse;
using Json = nlohmann::ordered_json;

Json text_config(const Json& changes = Json::object()) {
  Json config = testing::tiny_config("qwen3_5_text", {{"head_dim", 16},
                                                      {"num_hidden_layers", 5},
                                                      {"linear_num_key_heads", 2},
                                                      {"linear_num_value_heads", 6},
                                                      {"linear_key_head_dim", 4},
                                                      {"linear_value_head_dim", 8},
                                                      {"linear_conv_kernel_dim", 3}});
  config.update(changes);
  return config;
}

// As released: a text decoder beside a vision tower and heads that predict more tokens at once.
Json composite(const Json& changes = Json::object()) {
  Json config = {
      {"model_type", "qwen3_5"},
      {"architectures", {"Qwen3_5ForConditionalGeneration"}},
      {"image_token_id", 30},
      {"vision_config", {{"depth", 2}}},
      {"text_config", text_config({{"mtp_num_hidden_layers", 1}, {"mamba_ssm_dtype", "float32"}})}};
  config.update(changes);
  return config;
}

TEST(Qwen3_5, LayersOfTwoKinds) {
  const DecoderConfig config = parse(text_config());
  EXPECT_EQ(testing::layers_with<GatedDeltaSpec>(config), (std::vector<int64_t>{0, 1, 2, 4}));
  EXPECT_EQ(config.attention()->rotary_dim, 4);  // a quarter, unless said otherwise
  EXPECT_EQ(config.parameter_prefix, "model.");
  const ModelSpec& spec = config;
  const auto& delta = std::get<GatedDeltaSpec>(spec.layers[4].mixer);
  EXPECT_EQ(delta.conv_size(), 2 * 8 + 48);
  EXPECT_EQ(delta.state_size(), 6 * 4 * 8);
  const auto& attention = std::get<AttentionSpec>(spec.layers[3].mixer);
  EXPECT_TRUE(attention.output_gate && attention.query_key_norm && spec.layers[3].zero_centered_norm);
  EXPECT_NE(to_json(spec.layers[3]), to_json(spec.layers[4]));

  EXPECT_EQ(testing::layers_with<GatedDeltaSpec>(parse(text_config({{"full_attention_interval", 2}}))),
            (std::vector<int64_t>{0, 2, 4}));
  const Json types = {"full_attention", "linear_attention", "full_attention", "full_attention",
                      "linear_attention"};
  EXPECT_EQ(testing::layers_with<GatedDeltaSpec>(parse(text_config({{"layer_types", types}}))),
            (std::vector<int64_t>{1, 4}));
}

TEST(Qwen3_5, RotaryDimIsReadWhereverItStands) {
  EXPECT_EQ(parse(text_config({{"partial_rotary_factor", 0.5}})).attention()->rotary_dim, 8);
  const Json rope = {{"rope_theta", 500.0}, {"partial_rotary_factor", 0.5}, {"mrope_section", {2, 1, 1}}};
  EXPECT_EQ(parse(text_config({{"rope_parameters", rope}})).attention()->rotary_dim, 8);
}

TEST(Qwen3_5, TheTextDecoderOfACompositeModel) {
  const DecoderConfig config = parse(composite());
  EXPECT_EQ(config.model_type, "qwen3_5_text");
  EXPECT_EQ(config.num_hidden_layers(), 5);
  const std::vector<ParameterShape> shapes = parameter_shapes(config);
  EXPECT_EQ(shapes.front().name, "model.language_model.embed_tokens.weight");
  EXPECT_EQ(shapes[1].name, "model.language_model.layers.0.linear_attn.dt_bias");
  EXPECT_EQ(shapes.back().name, "lm_head.weight");
  EXPECT_EQ(parse(composite({{"dtype", "bfloat16"}})).dtype, "bfloat16");
}

TEST(Qwen3_5, RefusalsNameTheKey) {
  const auto refusal = [](const Json& json) { return message_of<InputError>([&] { parse(json); }); };
  const auto expect_named = [](const std::string& message, const std::string& key) {
    EXPECT_NE(message.find("FOLDER/config.json: " + key), std::string::npos) << message;
  };
  expect_named(refusal(text_config({{"linear_num_value_heads", 5}})), "linear_num_value_heads");
  expect_named(refusal(text_config({{"linear_conv_kernel_dim", 9}})), "linear_conv_kernel_dim");
  expect_named(refusal(text_config({{"attn_output_gate", false}})), "attn_output_gate");
  expect_named(refusal(text_config({{"layer_types", {"linear_attention"}}})), "layer_types");
  expect_named(refusal(text_config({{"layer_types", "linear_attention"}})), "layer_types");
  expect_named(refusal(text_config({{"partial_rotary_factor", 0.2}})), "partial_rotary_factor");
  expect_named(refusal(text_config({{"num_experts", 4}})), "num_experts");
  expect_named(refusal(testing::tiny_config("qwen3", {{"linear_key_head_dim", 4}})), "linear_key_head_dim");
  expect_named(refusal(composite({{"text_config", nullptr}})), "text_config");
  expect_named(refusal(composite({{"text_config", testing::tiny_config("llama")}})),
               "text_config.model_type");
  expect_named(refusal(composite({{"tie_word_embeddings", true}})), "tie_word_embeddings");
  expect_named(refusal(composite({{"audio_config", {{"depth", 2}}}})), "audio_config");
  expect_named(refusal(composite({{"quantization_config", {{"bits", 4}}}})), "quantization_config");
}

Json with_experts(const std::string& model_type, const Json& changes = Json::object()) {
  Json config = text_config({{"model_type", model_type},
                             {"num_experts", 4},
                             {"num_experts_per_tok", 2},
                             {"moe_intermediate_size", 7},
                             {"shared_expert_intermediate_size", 9}});
  if (model_type == "qwen3_5_moe_text") config.erase("intermediate_size");
  config.update(changes);
  return config;
}

std::vector<int64_t> shape_of(const DecoderConfig& config, const std::string& name) {
  for (const ParameterShape& parameter : parameter_shapes(config)) {
    if (parameter.name == name) return parameter.shape;
  }
  return {};
}

TEST(Qwen3_5, MoeHasAGatedSharedExpertInEveryLayer) {
  const DecoderConfig config = parse(with_experts("qwen3_5_moe_text"));
  EXPECT_EQ(testing::layers_with<MoeSpec>(config), (std::vector<int64_t>{0, 1, 2, 3, 4}));
  EXPECT_TRUE(config.moe()->norm_topk_prob && config.moe()->shared_expert_gate);
  EXPECT_FALSE(std::get<GatedDeltaSpec>(config.layers[0].mixer).fused_projections);
  EXPECT_EQ(shape_of(config, "model.layers.1.mlp.shared_expert_gate.weight"),
            (std::vector<int64_t>{1, config.hidden_size}));
  EXPECT_EQ(shape_of(config, "model.layers.1.mlp.shared_expert.up_proj.weight"),
            (std::vector<int64_t>{9, config.hidden_size}));
  const Json whole = {{"model_type", "qwen3_5_moe"}, {"text_config", with_experts("qwen3_5_moe_text")}};
  EXPECT_EQ(parse(whole).parameter_prefix, "model.language_model.");
}

TEST(Qwen3Next, ProjectionsAreTwoMatrices) {
  const DecoderConfig config =
      parse(with_experts("qwen3_next", {{"decoder_sparse_step", 2}, {"mlp_only_layers", {1}}}));
  EXPECT_EQ(testing::layers_with<MoeSpec>(config), std::vector<int64_t>{3});
  const int64_t keys = 2 * 4, values = 6 * 8;
  EXPECT_EQ(shape_of(config, "model.layers.0.linear_attn.in_proj_qkvz.weight"),
            (std::vector<int64_t>{2 * keys + 2 * values, config.hidden_size}));
  EXPECT_EQ(shape_of(config, "model.layers.0.linear_attn.in_proj_ba.weight"),
            (std::vector<int64_t>{12, config.hidden_size}));
  EXPECT_TRUE(shape_of(config, "model.layers.0.linear_attn.in_proj_qkv.weight").empty());
  const ModelSpec& spec = config;
  EXPECT_NE(to_json(spec.layers[0]), to_json(parse(text_config()).layers[0]));
}

}  // namespace
}  // namespace espalier
