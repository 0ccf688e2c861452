// SPDX-License-Identifier: Apache-2.0
// Families whose layers have the parts of others: their keys, defaults of Transformers, and refusals.
#include <gtest/gtest.h>

#include <cmath>

#include "espalier/base/check.h"
#include "espalier/config/layer_spec.h"
#include "tests/base/message_of.h"
#include "tests/config/tiny_config.h"

namespace espalier {
namespace {

using testing::message_of;
using testing::windows_of;
using Json = nlohmann::ordered_json;

const AttentionSpec& attention_of(const ModelSpec& spec, size_t layer) {
  return std::get<AttentionSpec>(spec.layers.at(layer).mixer);
}

/// A config.json with all keys that have no default, four layers and the given keys.
Json smallest_config(const std::string& type, const Json& changes = Json::object()) {
  Json config = {{"model_type", type},      {"vocab_size", 37},       {"hidden_size", 64},
                 {"intermediate_size", 24}, {"num_hidden_layers", 4}, {"num_attention_heads", 32}};
  if (type == "seed_oss") config.update({{"attention_dropout", 0.0}, {"residual_dropout", 0.0}});
  config.update(changes);
  return config;
}

DecoderConfig parse_smallest(const std::string& type, const Json& changes = Json::object()) {
  return testing::parse(smallest_config(type, changes));
}

std::vector<bool> rotary_layers(const ModelSpec& spec) {
  std::vector<bool> rotary;
  for (size_t i = 0; i < spec.layers.size(); ++i) rotary.push_back(attention_of(spec, i).rotary);
  return rotary;
}

// Those of Transformers 5.23. The default of pad_token_id counts if it is a token.
TEST(Families, FillTheDefaultsOfTransformers) {
  struct Case {
    std::string type;
    int64_t num_key_value_heads, head_dim, max_position_embeddings;
    double rms_norm_eps, rope_theta;
    bool tied;
    int64_t pad_token_id = -1;
  };
  const std::vector<Case> cases = {
      {"olmo2", 32, 2, 2048, 1e-5, 1e4, false, 1},       {"smollm3", 4, 2, 32768, 1e-6, 2e6, true, 128004},
      {"seed_oss", 8, 128, 524288, 1e-6, 1e4, false, 1}, {"ernie4_5", 2, 128, 131072, 1e-5, 5e5, true, 0},
      {"granite", 32, 2, 2048, 1e-6, 1e4, false},        {"mixtral", 8, 2, 131072, 1e-5, 1e6, false},
      {"ministral", 8, 2, 131072, 1e-6, 1e4, false},     {"exaone4", 32, 2, 2048, 1e-5, 1e4, false},
      {"phi3", 32, 2, 4096, 1e-5, 1e4, false, 32000},    {"gemma3_text", 4, 256, 131072, 1e-6, 1e6, true, 0},
      {"gemma", 16, 256, 8192, 1e-6, 1e4, true, 0},      {"gemma2", 4, 256, 8192, 1e-6, 1e4, true, 0},
  };
  for (const Case& expected : cases) {
    SCOPED_TRACE(expected.type);
    const DecoderConfig config = parse_smallest(expected.type, {{"vocab_size", 200'000}});
    EXPECT_EQ(config.attention()->num_key_value_heads, expected.num_key_value_heads);
    EXPECT_EQ(config.attention()->head_dim, expected.head_dim);
    EXPECT_EQ(config.max_position_embeddings, expected.max_position_embeddings);
    EXPECT_EQ(config.rms_norm_eps, expected.rms_norm_eps);
    EXPECT_EQ(config.rope.rope_theta, expected.rope_theta);
    EXPECT_EQ(config.tie_word_embeddings, expected.tied);
    EXPECT_EQ(config.pad_token_id, expected.pad_token_id);
    EXPECT_EQ(config.attention()->rotary_dim, 0);
  }
  EXPECT_EQ(parse_smallest("phi3").pad_token_id, -1);
  EXPECT_EQ(parse_smallest("seed_oss", {{"head_dim", nullptr}}).attention()->head_dim, 2);
  EXPECT_EQ(parse_smallest("ernie4_5", {{"head_dim", nullptr}}).attention()->head_dim, 2);
}

TEST(Families, Biases) {
  const auto biases = [](const std::string& type, const Json& changes = Json::object()) {
    const DecoderConfig config = parse_smallest(type, changes);
    return std::vector<bool>{config.attention()->bias, config.attention()->output_bias,
                             config.dense_mlp()->bias};
  };
  using Biases = std::vector<bool>;
  EXPECT_EQ(biases("seed_oss"), (Biases{true, false, false}));
  EXPECT_EQ(biases("seed_oss", {{"attention_bias", false}, {"attention_out_bias", true}, {"mlp_bias", true}}),
            (Biases{false, true, true}));
  EXPECT_EQ(biases("ernie4_5"), (Biases{false, false, false}));
  EXPECT_EQ(biases("ernie4_5", {{"use_bias", true}}), (Biases{true, true, true}));
  for (const char* type : {"smollm3", "granite"}) {
    EXPECT_EQ(biases(type, {{"attention_bias", true}}), (Biases{true, true, false})) << type;
    EXPECT_EQ(biases(type, {{"mlp_bias", true}}), (Biases{false, false, true})) << type;
  }
  for (const char* type : {"olmo2", "gemma3_text", "gemma2", "gemma"}) {
    EXPECT_EQ(biases(type, {{"attention_bias", true}}), (Biases{true, true, false})) << type;
  }
}

TEST(Families, Olmo2AndExaone4NormOutputs) {
  for (const char* type : {"olmo2", "exaone4"}) {
    const DecoderConfig config = parse_smallest(type);
    EXPECT_TRUE(config.layers[0].norm_outputs && !config.layers[0].norm_inputs) << type;
    EXPECT_TRUE(config.attention()->query_key_norm) << type;
    EXPECT_EQ(config.attention()->query_key_norm_over_heads, std::string(type) == "olmo2");
  }
}

TEST(Families, SmolLm3HasLayersWithoutRope) {
  using Layers = std::vector<bool>;
  EXPECT_EQ(rotary_layers(parse_smallest("smollm3")), (Layers{true, true, true, false}));
  EXPECT_EQ(rotary_layers(parse_smallest("smollm3", {{"no_rope_layer_interval", 2}})),
            (Layers{true, false, true, false}));
  const Json first = {{"no_rope_layers", {0, 1, 1, 1, 0, 0}}};  // longer lists are cut
  EXPECT_EQ(rotary_layers(parse_smallest("smollm3", first)), (Layers{false, true, true, true}));
  EXPECT_EQ(parse_smallest("smollm3", first).rotary_dim(), 2);
  EXPECT_EQ(parse_smallest("smollm3", {{"no_rope_layers", {0, 0, 0, 0}}}).rotary_dim(), 0);
  Json windows = first;
  windows.update({{"use_sliding_window", true}, {"sliding_window", 7}});
  EXPECT_EQ(windows_of(parse_smallest("smollm3", windows)), (std::vector<int64_t>{7, 0, 0, 0}));
  windows["layer_types"] = {"full_attention", "sliding_attention", "full_attention", "full_attention"};
  EXPECT_EQ(windows_of(parse_smallest("smollm3", windows)), (std::vector<int64_t>{0, 7, 0, 0}));
  windows["sliding_window"] = nullptr;
  windows["layer_types"] = nullptr;
  EXPECT_TRUE(parse_smallest("smollm3", windows).sliding_windows().empty());
}

TEST(Families, Exaone4HasNoPositionsBesideWindows) {
  using Layers = std::vector<bool>;
  const DecoderConfig config = parse_smallest("exaone4", {{"sliding_window", 9}});
  EXPECT_EQ(windows_of(config), (std::vector<int64_t>{9, 9, 9, 0}));
  EXPECT_EQ(rotary_layers(config), (Layers{true, true, true, false}));
  EXPECT_EQ(rotary_layers(parse_smallest("exaone4", {{"sliding_window_pattern", 2}})),
            (Layers{true, false, true, false}));
  EXPECT_EQ(parse_smallest("exaone4").sliding_windows(), std::vector<int64_t>{4096});
  const Json types = {"full_attention", "full_attention", "full_attention", "full_attention"};
  EXPECT_EQ(rotary_layers(parse_smallest("exaone4", {{"layer_types", types}})), Layers(4));
  // A pattern in letters is read where layer_types says what it stands for.
  const DecoderConfig full = parse_smallest(
      "exaone4", {{"sliding_window", nullptr}, {"layer_types", types}, {"sliding_window_pattern", "LLLG"}});
  EXPECT_EQ(rotary_layers(full), Layers(4, true));
  EXPECT_TRUE(full.sliding_windows().empty());
}

TEST(Families, WindowsOfMinistralMixtralAndPhi3) {
  const Json types = {"full_attention", "sliding_attention", "sliding_attention", "full_attention"};
  EXPECT_EQ(windows_of(parse_smallest("ministral", {{"sliding_window", 7}, {"layer_types", types}})),
            (std::vector<int64_t>{0, 7, 7, 0}));
  EXPECT_EQ(windows_of(parse_smallest("ministral")), std::vector<int64_t>(4, 4096));
  EXPECT_TRUE(parse_smallest("ministral", {{"sliding_window", nullptr}}).sliding_windows().empty());
  for (const char* type : {"mixtral", "phi3"}) {
    EXPECT_TRUE(parse_smallest(type).sliding_windows().empty()) << type;
    EXPECT_EQ(windows_of(parse_smallest(type, {{"sliding_window", 7}})), std::vector<int64_t>(4, 7)) << type;
  }
}

TEST(Families, MixtralHasTheNamesOfItsCheckpoint) {
  const ModelSpec spec = parse_smallest("mixtral", {{"num_local_experts", 3}});
  EXPECT_EQ(spec.moe()->num_experts_per_tok, 2);
  EXPECT_EQ(spec.moe()->moe_intermediate_size, 24);
  EXPECT_TRUE(spec.moe()->norm_topk_prob);
  EXPECT_EQ(parse_smallest("mixtral").moe()->num_experts, 8);
  std::vector<std::string> names;
  for (const ParameterShape& parameter : layer_parameters(spec.layers[0], 64))
    names.push_back(parameter.name);
  ASSERT_EQ(names.size(), 4 + 1 + 3 * 3 + 2u);
  const std::string experts = "block_sparse_moe.experts.0.";
  EXPECT_EQ(std::vector<std::string>(names.begin() + 4, names.begin() + 8),
            (std::vector<std::string>{"block_sparse_moe.gate.weight", experts + "w1.weight",
                                      experts + "w3.weight", experts + "w2.weight"}));
}

TEST(Families, GraniteHasItsFactors) {
  const DecoderConfig config = parse_smallest("granite", {{"attention_multiplier", 0.25},
                                                          {"embedding_multiplier", 12},
                                                          {"residual_multiplier", 0.22},
                                                          {"logits_scaling", 6}});
  EXPECT_EQ(config.attention()->attention_multiplier, 0.25);
  EXPECT_EQ(config.embedding_multiplier, 12);
  EXPECT_EQ(config.residual_multiplier, 0.22);
  EXPECT_EQ(config.logits_scaling, 6);
  EXPECT_EQ(parse_smallest("granite").attention()->attention_multiplier, 1);
}

TEST(Families, Phi3RotatesAPart) {
  const auto rotary_dim = [](const Json& changes) {
    return parse_smallest("phi3", changes).attention()->rotary_dim;
  };
  EXPECT_EQ(rotary_dim({{"head_dim", 16}, {"partial_rotary_factor", 0.75}}), 12);
  EXPECT_EQ(rotary_dim({{"head_dim", 16}, {"rope_parameters", {{"partial_rotary_factor", 0.5}}}}), 8);
  EXPECT_EQ(rotary_dim({{"head_dim", 16}, {"original_max_position_embeddings", 4096}}), 0);
  EXPECT_TRUE(parse_smallest("phi3").attention()->fused && parse_smallest("phi3").dense_mlp()->names.fused());
}

TEST(Families, GemmaHasNormsAroundOneAndAFactor) {
  for (const char* type : {"gemma", "gemma2", "gemma3_text"}) {
    const DecoderConfig config = parse_smallest(type);
    EXPECT_TRUE(config.zero_centered_norm() && config.layers[0].norm_inputs) << type;
    EXPECT_EQ(config.layers[0].norm_outputs, std::string(type) != "gemma");
    EXPECT_EQ(config.attention()->query_key_norm, std::string(type) == "gemma3_text");
    EXPECT_EQ(config.embedding_multiplier, 8) << type;
    EXPECT_TRUE(config.round_embedding_multiplier) << type;
    EXPECT_EQ(config.dense_mlp()->activation, Activation::kGeluTanh) << type;
  }
}

TEST(Families, Gemma2HasSoftcaps) {
  const DecoderConfig plain = parse_smallest("gemma2", {{"hidden_act", "gelu_pytorch_tanh"}});
  EXPECT_EQ(plain.attention()->softcap, 50);
  EXPECT_EQ(plain.final_logit_softcapping, 30);
  EXPECT_EQ(windows_of(plain), (std::vector<int64_t>{4096, 0, 4096, 0}));
  EXPECT_EQ(plain.attention()->attention_multiplier, 1.0 / 16);
  EXPECT_FALSE(plain.sliding_rope.has_value());
  const Json types = {"full_attention", "full_attention", "sliding_attention", "full_attention"};
  const DecoderConfig other = parse_smallest("gemma2", {{"attn_logit_softcapping", 20.0},
                                                        {"final_logit_softcapping", nullptr},
                                                        {"query_pre_attn_scalar", 16},
                                                        {"sliding_window", 7},
                                                        {"layer_types", types}});
  EXPECT_EQ(other.attention()->softcap, 20);
  EXPECT_EQ(other.final_logit_softcapping, 0);
  EXPECT_EQ(windows_of(other), (std::vector<int64_t>{0, 0, 7, 0}));
  EXPECT_EQ(other.attention()->attention_multiplier, 0.25);
  EXPECT_EQ(parse_smallest("gemma2", {{"attn_logit_softcapping", nullptr}}).attention()->softcap, 0);
}

// The keys of the first release, of Transformers 4, and those of Transformers 5.
TEST(Families, Gemma3HasTwoRopes) {
  const DecoderConfig older =
      parse_smallest("gemma3_text", {{"rope_theta", 300},
                                     {"rope_local_base_freq", 20},
                                     {"rope_scaling", {{"rope_type", "linear"}, {"factor", 8.0}}},
                                     {"cache_implementation", "hybrid"},
                                     {"attn_logit_softcapping", nullptr},
                                     {"final_logit_softcapping", nullptr},
                                     {"query_pre_attn_scalar", 16},
                                     {"sliding_window", 7},
                                     {"sliding_window_pattern", 3}});
  const Json types = {"sliding_attention", "sliding_attention", "full_attention", "sliding_attention"};
  const DecoderConfig newer = parse_smallest(
      "gemma3_text", {{"rope_parameters",
                       {{"full_attention", {{"rope_theta", 300.0}, {"rope_type", "linear"}, {"factor", 8.0}}},
                        {"sliding_attention", {{"rope_theta", 20.0}, {"rope_type", "default"}}}}},
                      {"_sliding_window_pattern", 6},
                      {"layer_types", types},
                      {"query_pre_attn_scalar", 16},
                      {"sliding_window", 7}});
  for (const DecoderConfig& config : {older, newer}) {
    EXPECT_EQ(config.rope.rope_theta, 300);
    EXPECT_EQ(std::get<LinearRope>(config.rope.scaling).factor, 8);
    EXPECT_EQ(config.sliding_rope.value().rope_theta, 20);
    EXPECT_TRUE(std::holds_alternative<std::monostate>(config.sliding_rope->scaling));
    EXPECT_EQ(windows_of(config), (std::vector<int64_t>{7, 7, 0, 7}));
    EXPECT_EQ(config.attention()->attention_multiplier, 0.25);
  }
  const DecoderConfig plain = parse_smallest("gemma3_text");
  EXPECT_EQ(plain.rope.rope_theta, 1e6);
  EXPECT_EQ(plain.sliding_rope.value().rope_theta, 1e4);
  EXPECT_EQ(windows_of(plain), std::vector<int64_t>(4, 4096));
  EXPECT_EQ(plain.attention()->attention_multiplier, 1.0 / 16);
}

TEST(Families, RefusalsNameTheKey) {
  struct Case {
    std::string type, key;
    Json changes;
  };
  const Json longrope = {{"rope_type", "longrope"}, {"short_factor", {1}}, {"long_factor", {1}}};
  const Json sliding = {"sliding_attention", "full_attention", "full_attention", "full_attention"};
  const std::vector<Case> cases = {
      {"olmo2", "sliding_window", {{"sliding_window", 4}}},
      {"olmo2", "mlp_bias", {{"mlp_bias", true}}},
      {"olmo2", "clip_qkv", {{"clip_qkv", 8.0}}},
      {"smollm3", "no_rope_layers", {{"no_rope_layers", {1, 1, 0}}}},
      {"smollm3", "no_rope_layers", {{"no_rope_layers", {1, 1, 0, 2}}}},
      {"smollm3", "no_rope_layers", {{"no_rope_layers", 4}}},
      {"smollm3", "no_rope_layer_interval", {{"no_rope_layer_interval", 0}}},
      {"smollm3", "layer_types", {{"layer_types", sliding}, {"sliding_window", 4}}},
      {"seed_oss", "attention_dropout", {{"attention_dropout", 0.1}}},
      {"seed_oss", "attention_dropout", {{"attention_dropout", nullptr}}},
      {"seed_oss", "residual_dropout", {{"residual_dropout", 0.1}}},
      {"seed_oss", "residual_dropout", {{"residual_dropout", nullptr}}},
      {"seed_oss", "pretraining_tp", {{"pretraining_tp", 2}}},
      {"ernie4_5", "attention_bias", {{"attention_bias", true}}},
      {"ernie4_5", "mlp_bias", {{"mlp_bias", true}}},
      {"ernie4_5", "use_bias", {{"use_bias", 1}}},
      {"granite", "residual_multiplier", {{"residual_multiplier", 0}}},
      {"granite", "sliding_window", {{"sliding_window", 4}}},
      {"granite", "num_local_experts", {{"num_local_experts", 4}}},
      {"mixtral", "num_experts_per_tok", {{"num_experts_per_tok", 9}}},
      {"mixtral", "router_jitter_noise", {{"router_jitter_noise", 0.1}}},
      {"mixtral", "num_experts", {{"num_experts", 4}}},
      {"mixtral", "attention_bias", {{"attention_bias", true}}},
      {"mixtral", "layer_types", {{"layer_types", sliding}, {"sliding_window", 4}}},
      {"ministral", "layer_types", {{"layer_types", sliding}, {"sliding_window", nullptr}}},
      {"ministral", "use_sliding_window", {{"use_sliding_window", true}}},
      {"ministral", "mlp_bias", {{"mlp_bias", true}}},
      {"exaone4", "sliding_window_pattern", {{"sliding_window_pattern", "LLLG"}}},
      {"exaone4", "layer_types", {{"layer_types", sliding}, {"sliding_window", nullptr}}},
      {"exaone4", "use_sliding_window", {{"use_sliding_window", true}}},
      {"exaone4", "attention_bias", {{"attention_bias", true}}},
      {"phi3", "rope_parameters.rope_type", {{"rope_parameters", longrope}}},
      {"phi3", "rope_scaling.rope_type", {{"rope_scaling", longrope}}},
      {"phi3", "rope_scaling.type", {{"rope_scaling", {{"type", "su"}}}}},
      {"phi3", "rope_scaling.type", {{"rope_scaling", {{"type", "yarn"}, {"factor", 2.0}}}}},
      {"phi3", "resid_pdrop", {{"resid_pdrop", 0.1}}},
      {"phi3", "embd_pdrop", {{"embd_pdrop", 0.1}}},
      {"phi3", "attention_bias", {{"attention_bias", true}}},
      {"phi3", "partial_rotary_factor", {{"head_dim", 8}, {"partial_rotary_factor", 0.4}}},
      {"gemma3_text", "attn_logit_softcapping", {{"attn_logit_softcapping", 50.0}}},
      {"gemma3_text", "final_logit_softcapping", {{"final_logit_softcapping", 30.0}}},
      {"gemma3_text", "use_bidirectional_attention", {{"use_bidirectional_attention", true}}},
      {"gemma3_text", "hidden_activation", {{"hidden_activation", "gelu"}}},
      {"gemma3_text", "query_pre_attn_scalar", {{"query_pre_attn_scalar", 0}}},
      {"gemma3_text", "sliding_window", {{"sliding_window", nullptr}}},
      {"gemma3_text",
       "rope_theta",
       {{"rope_theta", 10.0}, {"rope_parameters", {{"full_attention", {{"rope_theta", 20.0}}}}}}},
      {"gemma3_text",
       "rope_local_base_freq",
       {{"rope_local_base_freq", 10.0},
        {"rope_parameters", {{"sliding_attention", {{"rope_theta", 20.0}}}}}}},
      {"gemma3_text", "rope_parameters.rope_theta", {{"rope_parameters", {{"rope_theta", 20.0}}}}},
      {"gemma2", "attn_logit_softcapping", {{"attn_logit_softcapping", 0}}},
      {"gemma2", "final_logit_softcapping", {{"final_logit_softcapping", -30.0}}},
      {"gemma2", "hidden_activation", {{"hidden_activation", "gelu"}}},
      {"gemma2", "use_bidirectional_attention", {{"use_bidirectional_attention", true}}},
      {"gemma2", "sliding_window", {{"sliding_window", nullptr}}},
      {"gemma", "hidden_act", {{"hidden_act", "gelu"}}},
      {"gemma", "hidden_activation", {{"hidden_activation", "gelu"}}},
      {"gemma", "use_bidirectional_attention", {{"use_bidirectional_attention", true}}},
      {"gemma", "sliding_window", {{"sliding_window", 4}}},
  };
  for (const Case& refused : cases) {
    SCOPED_TRACE(refused.type + refused.changes.dump());
    const std::string message =
        message_of<InputError>([&] { parse_smallest(refused.type, refused.changes); });
    EXPECT_EQ(message.rfind("FOLDER/config.json: " + refused.key, 0), 0u) << message;
  }
}

}  // namespace
}  // namespace espalier
