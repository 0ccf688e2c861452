// SPDX-License-Identifier: Apache-2.0
// The family deepseek_v3: latent attention, and experts in groups after dense layers.
#include <gtest/gtest.h>

#include <cmath>

#include "espalier/base/check.h"
#include "espalier/config/layer_spec.h"
#include "tests/base/message_of.h"
#include "tests/config/tiny_config.h"

namespace espalier {
namespace {

using testing::message_of;
using testing::parse;
using Json = nlohmann::ordered_json;

const Json kYarn = {{"type", "yarn"},
                    {"factor", 40},
                    {"mscale", 1.0},
                    {"mscale_all_dim", 1.0},
                    {"beta_fast", 32},
                    {"beta_slow", 1},
                    {"original_max_position_embeddings", 4096}};

Json tiny_deepseek(const Json& changes = Json::object()) {
  Json config = {{"model_type", "deepseek_v3"}, {"vocab_size", 37},       {"hidden_size", 16},
                 {"intermediate_size", 24},     {"num_hidden_layers", 5}, {"num_attention_heads", 4},
                 {"num_key_value_heads", 4},    {"n_routed_experts", 16}, {"num_experts_per_tok", 3},
                 {"moe_intermediate_size", 7},  {"rope_scaling", kYarn}};
  config.update(changes);
  return config;
}

const LatentAttentionSpec& attention_of(const ModelSpec& spec) {
  return std::get<LatentAttentionSpec>(spec.layers[0].mixer);
}

TEST(DeepseekV3, DefaultsAreThoseOfTransformers) {
  const DecoderConfig config = parse(tiny_deepseek());
  const double mscale = 0.1 * std::log(40) + 1;
  EXPECT_EQ(attention_of(config), (LatentAttentionSpec{.num_attention_heads = 4,
                                                       .q_lora_rank = 1536,
                                                       .kv_lora_rank = 512,
                                                       .qk_nope_head_dim = 128,
                                                       .qk_rope_head_dim = 64,
                                                       .v_head_dim = 128,
                                                       .softmax_scale = mscale * mscale / std::sqrt(192.0)}));
  EXPECT_EQ(config.rotary_dim(), 64);
  EXPECT_EQ(std::get<YarnRope>(config.rope.scaling).attention_factor, 1);
  EXPECT_EQ(testing::layers_with<MoeSpec>(config), (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(config.moe()->n_group, 8);
  EXPECT_EQ(config.moe()->topk_group, 4);
  EXPECT_EQ(config.moe()->routed_scaling_factor, 2.5);
  EXPECT_TRUE(config.moe()->correction_bias);
  EXPECT_EQ(config.num_prediction_layers, 1);
  EXPECT_EQ(attention_of(parse(tiny_deepseek({{"q_lora_rank", nullptr}}))).q_lora_rank, 0);
  const Json without_all = {{"rope_scaling", {{"type", "yarn"}, {"factor", 40}}}};
  EXPECT_EQ(attention_of(parse(tiny_deepseek(without_all))).softmax_scale, std::pow(192.0, -0.5));
}

TEST(DeepseekV3, ParametersHaveTheNamesOfTheCheckpoint) {
  const ModelSpec& spec = parse(tiny_deepseek({{"attention_bias", true}}));
  std::vector<std::string> names;
  for (const ParameterShape& parameter : layer_parameters(spec.layers[0], spec.hidden_size)) {
    if (parameter.name.starts_with("self_attn.")) names.push_back(parameter.name.substr(10));
  }
  EXPECT_EQ(names, (std::vector<std::string>{"q_a_proj.weight", "q_a_proj.bias", "q_a_layernorm.weight",
                                             "q_b_proj.weight", "kv_a_proj_with_mqa.weight",
                                             "kv_a_proj_with_mqa.bias", "kv_a_layernorm.weight",
                                             "kv_b_proj.weight", "o_proj.weight", "o_proj.bias"}));
}

TEST(DeepseekV3, JsonIsEqualForEqualLayersOnly) {
  const LayerSpec layer = parse(tiny_deepseek()).layers[0];
  const auto differs = [&](const auto& change) {
    LayerSpec other = layer;
    change(std::get<LatentAttentionSpec>(other.mixer));
    return to_json(other) != to_json(layer);
  };
  EXPECT_FALSE(differs([](LatentAttentionSpec&) {}));
  EXPECT_TRUE(differs([](LatentAttentionSpec& a) { a.num_attention_heads = 2; }));
  EXPECT_TRUE(differs([](LatentAttentionSpec& a) { a.q_lora_rank = 0; }));
  EXPECT_TRUE(differs([](LatentAttentionSpec& a) { a.kv_lora_rank = 2; }));
  EXPECT_TRUE(differs([](LatentAttentionSpec& a) { a.qk_nope_head_dim = 2; }));
  EXPECT_TRUE(differs([](LatentAttentionSpec& a) { a.qk_rope_head_dim = 2; }));
  EXPECT_TRUE(differs([](LatentAttentionSpec& a) { a.v_head_dim = 2; }));
  EXPECT_TRUE(differs([](LatentAttentionSpec& a) { a.bias = true; }));
  EXPECT_TRUE(differs([](LatentAttentionSpec& a) { a.rope_interleave = false; }));
  EXPECT_TRUE(differs([](LatentAttentionSpec& a) { a.softmax_scale = 1; }));
}

TEST(DeepseekV3, RefusalsNameTheKey) {
  const auto expect_refused = [](const std::string& key, const Json& value) {
    const std::string message = message_of<InputError>([&] { parse(tiny_deepseek({{key, value}})); });
    EXPECT_EQ(message.find("FOLDER/config.json: " + key), 0u) << value.dump() << ": " << message;
  };
  expect_refused("num_key_value_heads", 2);
  expect_refused("qk_rope_head_dim", 63);
  expect_refused("v_head_dim", 193);
  expect_refused("kv_lora_rank", 0);
  expect_refused("attention_dropout", 0.1);
  expect_refused("moe_layer_freq", 2);
  expect_refused("scoring_func", "softmax");
  expect_refused("topk_method", "group_limited_greedy");
  expect_refused("n_group", 3);
  expect_refused("mlp_bias", true);
  expect_refused("sliding_window", 4);
  expect_refused("rope_scaling", {{"type", "dynamic"}, {"factor", 2.0}});
  expect_refused("quantization_config", {{"quant_method", "fp8"}});
}

}  // namespace
}  // namespace espalier
