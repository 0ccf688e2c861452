// SPDX-License-Identifier: Apache-2.0
// The family gpt_oss.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "espalier/base/check.h"
#include "espalier/config/layer_spec.h"
#include "tests/base/message_of.h"
#include "tests/config/tiny_config.h"

namespace espalier {
namespace {

using testing::message_of;
using testing::tiny_config;
using Json = nlohmann::ordered_json;

DecoderConfig parse_tiny(const Json& changes = Json::object()) {
  return testing::parse(tiny_config("gpt_oss", changes));
}

TEST(GptOss, ReadsItsKeys) {
  const DecoderConfig config = parse_tiny({{"num_hidden_layers", 3}});
  EXPECT_EQ(*config.moe(), (MoeSpec{.num_experts = 5,
                                    .num_experts_per_tok = 2,
                                    .moe_intermediate_size = 24,
                                    .scores = RouterScores::kSoftmaxOverChosen,
                                    .clamped_swiglu = ClampedSwiglu{1.702, 0.5},
                                    .router_name = "mlp.router"}));
  EXPECT_EQ(testing::layers_with<MoeSpec>(config), (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(testing::windows_of(config), (std::vector<int64_t>{3, 0, 3}));
  const AttentionSpec attention = *config.attention();
  EXPECT_TRUE(attention.bias && attention.output_bias && attention.sinks);
  const DecoderConfig other =
      parse_tiny({{"attention_bias", false}, {"layer_types", {"full_attention", "full_attention"}}});
  EXPECT_FALSE(other.attention()->bias || other.attention()->output_bias);
  EXPECT_TRUE(other.attention()->sinks);
  EXPECT_EQ(testing::windows_of(other), (std::vector<int64_t>{0, 0}));
}

TEST(GptOss, FillsTheDefaultsOfTransformers) {
  const Json absent = {{"head_dim", nullptr},       {"num_attention_heads", 16},
                       {"num_key_value_heads", 8},  {"rms_norm_eps", nullptr},
                       {"swiglu_limit", nullptr},   {"max_position_embeddings", nullptr},
                       {"rope_parameters", nullptr}};
  Json json = tiny_config("gpt_oss", absent);
  json.erase("sliding_window");
  const DecoderConfig config = parse_config(json, "config.json");
  EXPECT_EQ(config.attention()->head_dim, 64);
  EXPECT_EQ(config.attention()->sliding_window, 128);
  EXPECT_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_EQ(config.max_position_embeddings, 131072);
  EXPECT_EQ(config.moe()->clamped_swiglu, ClampedSwiglu());
  EXPECT_EQ(config.rope.rope_theta, 150000);
  const auto& yarn = std::get<YarnRope>(config.rope.scaling);
  EXPECT_EQ(yarn.factor, 32);
  EXPECT_EQ(yarn.original_max_position_embeddings, 4096);
  EXPECT_FALSE(yarn.truncate);
  EXPECT_DOUBLE_EQ(yarn.attention_factor, 0.1 * std::log(32.0) + 1);
  json["rope_theta"] = 700.0;
  EXPECT_EQ(parse_config(json, "config.json").rope.rope_theta, 700);
  EXPECT_TRUE(std::holds_alternative<YarnRope>(parse_config(json, "config.json").rope.scaling));
  // An empty object is a rope without scaling, as in Transformers.
  const DecoderConfig plain = parse_tiny({{"rope_parameters", Json::object()}});
  EXPECT_TRUE(std::holds_alternative<std::monostate>(plain.rope.scaling));
  EXPECT_EQ(plain.rope.rope_theta, 150000);
}

// Keys that the first release has beside those that count, and the rope as Transformers 4 writes it.
TEST(GptOss, ReadsTheConfigOfTheFirstRelease) {
  const Json rope = {{"beta_fast", 32.0},   {"beta_slow", 1.0},
                     {"factor", 32.0},      {"original_max_position_embeddings", 4096},
                     {"rope_type", "yarn"}, {"truncate", false}};
  const DecoderConfig config = parse_tiny({{"experts_per_token", 2},
                                           {"initial_context_length", 4096},
                                           {"output_router_logits", false},
                                           {"router_aux_loss_coef", 0.9},
                                           {"rope_parameters", nullptr},
                                           {"rope_scaling", rope},
                                           {"rope_theta", 150000}});
  EXPECT_EQ(config.rope.rope_theta, 150000);
  EXPECT_FALSE(std::get<YarnRope>(config.rope.scaling).truncate);
}

TEST(GptOss, RefusalsNameTheKey) {
  const auto expect_refused = [](const std::string& key, const Json& changes, const std::string& text = "") {
    const std::string message = message_of<InputError>([&] { parse_tiny(changes); });
    EXPECT_EQ(message.rfind("FOLDER/config.json: " + key, 0), 0u) << message;
    EXPECT_NE(message.find(text), std::string::npos) << message;
  };
  expect_refused("quantization_config", {{"quantization_config", {{"quant_method", "mxfp4"}}}},
                 "Mxfp4Config(dequantize=True)");
  expect_refused("num_local_experts", {{"num_local_experts", 0}});
  expect_refused("num_experts_per_tok", {{"num_experts_per_tok", 6}});
  expect_refused("experts_per_token", {{"experts_per_token", 3}});
  expect_refused("intermediate_size", {{"intermediate_size", nullptr}});
  expect_refused("swiglu_limit", {{"swiglu_limit", 0}});
  expect_refused("swiglu_alpha", {{"swiglu_alpha", "1.702"}});
  expect_refused("sliding_window", {{"sliding_window", nullptr}});
  expect_refused("layer_types", {{"layer_types", {"linear_attention", "full_attention"}}});
  expect_refused("use_sliding_window", {{"use_sliding_window", true}});
  expect_refused("mlp_bias", {{"mlp_bias", false}});
  expect_refused("hidden_act", {{"hidden_act", "gelu"}});
  expect_refused("attention_dropout", {{"attention_dropout", 0.1}});
  expect_refused("moe_intermediate_size", {{"moe_intermediate_size", 8}});
  expect_refused("partial_rotary_factor", {{"partial_rotary_factor", 0.5}});
}

TEST(GptOss, ParametersHaveTheNamesOfTheCheckpoint) {
  const ModelSpec spec = parse_tiny();
  const std::vector<ParameterShape> parameters = layer_parameters(spec.layers[1], spec.hidden_size);
  std::vector<std::string> names;
  for (const ParameterShape& parameter : parameters) names.push_back(parameter.name);
  EXPECT_EQ(names, (std::vector<std::string>{
                       "self_attn.sinks", "self_attn.q_proj.weight", "self_attn.q_proj.bias",
                       "self_attn.k_proj.weight", "self_attn.k_proj.bias", "self_attn.v_proj.weight",
                       "self_attn.v_proj.bias", "self_attn.o_proj.weight", "self_attn.o_proj.bias",
                       "mlp.router.weight", "mlp.router.bias", "mlp.experts.gate_up_proj",
                       "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj", "mlp.experts.down_proj_bias",
                       "input_layernorm.weight", "post_attention_layernorm.weight"}));
  const auto shape_of = [&](const std::string& name) {
    return parameters[std::ranges::find(names, name) - names.begin()].shape;
  };
  EXPECT_EQ(shape_of("self_attn.sinks"), std::vector<int64_t>{4});
  EXPECT_EQ(shape_of("mlp.router.bias"), std::vector<int64_t>{5});
  EXPECT_EQ(shape_of("mlp.experts.gate_up_proj"), (std::vector<int64_t>{5, 16, 48}));
  EXPECT_EQ(shape_of("mlp.experts.gate_up_proj_bias"), (std::vector<int64_t>{5, 48}));
  EXPECT_EQ(shape_of("mlp.experts.down_proj"), (std::vector<int64_t>{5, 24, 16}));
  EXPECT_EQ(shape_of("mlp.experts.down_proj_bias"), (std::vector<int64_t>{5, 16}));
}

}  // namespace
}  // namespace espalier
