// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/config.h"

#include <gtest/gtest.h>

#include <cmath>

#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "espalier/base/check.h"
#include "tests/base/message_of.h"
#include "tests/base/scratch_folder.h"
#include "tests/config/tiny_config.h"

namespace espalier {
namespace {

using testing::layers_with;
using testing::message_of;
using testing::parse;
using testing::ScratchFolder;
using testing::tiny_config;
using testing::windows_of;
using Json = nlohmann::ordered_json;

std::string refusal(const Json& json) {
  return message_of<InputError>([&] { parse(json); });
}

void write(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path) << text;
}

TEST(Config, ReadsTransformers5) {
  const DecoderConfig config = parse(tiny_config("llama"));
  EXPECT_EQ(config.model_type, "llama");
  EXPECT_EQ(config.vocab_size, 37);
  EXPECT_EQ(config.attention()->num_key_value_heads, 2);
  EXPECT_EQ(config.attention()->head_dim, 6);
  EXPECT_EQ(config.rope.rope_theta, 500);
  EXPECT_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_EQ(config.initializer_range, 0.02);
  EXPECT_EQ(config.dtype, "float32");
  EXPECT_TRUE(std::holds_alternative<std::monostate>(config.rope.scaling));
  EXPECT_FALSE(config.tie_word_embeddings || config.attention()->bias || config.dense_mlp()->bias ||
               config.attention()->query_key_norm);
}

// The keys of SmolLM2-135M-Instruct.
TEST(Config, ReadsTransformers4) {
  const Json json = Json::parse(R"({"architectures": ["LlamaForCausalLM"], "attention_bias": false,
      "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
      "initializer_range": 0.0416, "intermediate_size": 1536, "is_llama_config": true,
      "max_position_embeddings": 8192, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 9,
      "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1,
      "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null, "rope_theta": 100000,
      "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers.js_config": {"kv_cache_dtype":
      {"fp16": "float16"}}, "transformers_version": "4.42.3", "use_cache": true, "vocab_size": 49152})");
  const DecoderConfig config = parse(json);
  EXPECT_EQ(config.attention()->head_dim, 64);
  EXPECT_EQ(config.rope.rope_theta, 100000);
  EXPECT_EQ(config.initializer_range, 0.0416);
  EXPECT_EQ(config.dtype, "bfloat16");
  EXPECT_TRUE(config.tie_word_embeddings);
}

// Of Transformers 5.23: nn.Embedding(vocab_size, hidden_size, config.pad_token_id).
TEST(Config, ReadsTheRowThatTransformersDoesNotTrain) {
  const auto row = [](const std::string& type, const Json& keys) {
    Json config = tiny_config(type, keys);
    if (type == "olmo3") config.erase("rope_parameters");
    return parse(config).pad_token_id;
  };
  for (const char* type : {"llama", "mistral", "olmo3", "qwen2", "qwen3"}) {
    EXPECT_EQ(row(type, {{"pad_token_id", 2}}), 2) << type;
    EXPECT_EQ(row(type, {{"pad_token_id", nullptr}}), -1) << type;
    EXPECT_EQ(row(type, Json::object()), std::string(type) == "olmo3" ? 1 : -1) << type;
  }
  const int64_t vocab_size = parse(tiny_config("llama", Json::object())).vocab_size;
  EXPECT_EQ(row("llama", {{"pad_token_id", -1}}), vocab_size - 1);
  for (const Json& refused : {Json(vocab_size), Json(-vocab_size - 1), Json("2"), Json(1.5)}) {
    EXPECT_EQ(row("llama", {{"pad_token_id", refused}}), -1) << refused;
  }
}

TEST(Config, FillsTheDefaultsOfTransformers) {
  Json json = {{"vocab_size", 8},        {"hidden_size", 256},        {"intermediate_size", 8},
               {"num_hidden_layers", 1}, {"num_attention_heads", 64}, {"model_type", "llama"}};
  EXPECT_EQ(parse(json).attention()->num_key_value_heads, 64);
  EXPECT_EQ(parse(json).attention()->head_dim, 4);
  EXPECT_EQ(parse(json).max_position_embeddings, 2048);
  EXPECT_EQ(parse(json).rms_norm_eps, 1e-6);
  EXPECT_EQ(parse(json).rope.rope_theta, 10000);
  json["model_type"] = "qwen2";
  EXPECT_EQ(parse(json).attention()->num_key_value_heads, 32);
  EXPECT_EQ(parse(json).attention()->head_dim, 4);
  EXPECT_EQ(parse(json).max_position_embeddings, 32768);
  json["num_key_value_heads"] = nullptr;
  EXPECT_EQ(parse(json).attention()->num_key_value_heads, 64);
  json["model_type"] = "qwen3";
  EXPECT_EQ(parse(json).attention()->head_dim, 128);
  json["initializer_range"] = 0;
  EXPECT_EQ(parse(json).initializer_range, 0.02);
}

TEST(Config, KnowsTheBiasesOfEachFamily) {
  const auto biases = [](const std::string& type, bool given) {
    const DecoderConfig config = parse(tiny_config(type, {{"attention_bias", given}}));
    return std::pair(config.attention()->bias, config.attention()->output_bias);
  };
  EXPECT_EQ(biases("llama", false), std::pair(false, false));
  EXPECT_EQ(biases("llama", true), std::pair(true, true));
  EXPECT_EQ(biases("qwen3", true), std::pair(true, true));
  EXPECT_EQ(biases("qwen2", true), std::pair(true, false));
  const AttentionSpec qwen2 = *parse(tiny_config("qwen2")).attention();
  EXPECT_TRUE(qwen2.bias && !qwen2.output_bias && !qwen2.query_key_norm);
  EXPECT_TRUE(parse(tiny_config("qwen3")).attention()->query_key_norm);
  EXPECT_TRUE(parse(tiny_config("llama", {{"mlp_bias", true}})).dense_mlp()->bias);
}

TEST(Config, ReadsLlama3RopeOfBothVersions) {
  const Json version4 = tiny_config("llama", {{"rope_parameters", nullptr},
                                              {"rope_theta", 500000.0},
                                              {"rope_scaling",
                                               {{"rope_type", "llama3"},
                                                {"factor", 32.0},
                                                {"low_freq_factor", 1.5},
                                                {"high_freq_factor", 4.0},
                                                {"original_max_position_embeddings", 4096}}}});
  Json version5 = version4;
  version5.erase("rope_theta");
  version5["rope_parameters"] = version5["rope_scaling"];
  version5["rope_parameters"]["rope_theta"] = 500000.0;
  version5.erase("rope_scaling");
  for (const Json& json : {version4, version5}) {
    const DecoderConfig config = parse(json);
    EXPECT_EQ(config.rope.rope_theta, 500000);
    const auto& rope = std::get<Llama3Rope>(config.rope.scaling);
    EXPECT_EQ(rope.factor, 32);
    EXPECT_EQ(rope.low_freq_factor, 1.5);
    EXPECT_EQ(rope.high_freq_factor, 4);
    EXPECT_EQ(rope.original_max_position_embeddings, 4096);
  }
  version5["rope_parameters"].erase("original_max_position_embeddings");
  EXPECT_EQ(std::get<Llama3Rope>(parse(version5).rope.scaling).original_max_position_embeddings, 128);
  version5["rope_parameters"].erase("factor");
  EXPECT_NE(refusal(version5).find("rope_parameters.factor"), std::string::npos);
}

TEST(Config, AcceptsWhatChangesNothing) {
  const std::vector<Json> harmless = {
      {{"rope_parameters", nullptr}, {"rope_theta", 500.0}, {"rope_scaling", {{"type", "default"}}}},
      {{"rope_theta", 500.0}, {"rope_scaling", nullptr}},
      {{"use_sliding_window", false}, {"sliding_window", 4096}, {"max_window_layers", 1}},
      {{"layer_types", {"full_attention", "full_attention"}}},
      {{"quantization_config", nullptr}, {"anything_unknown", nullptr}},
      {{"hidden_act", "swish"},
       {"pretraining_tp", 1},
       {"partial_rotary_factor", 1.0},
       {"attention_dropout", 0}},
      {{"_name_or_path", "x"},
       {"unsloth_fixed", true},
       {"use_cache", true},
       {"transformers_version", "4.51.0"}},
      {{"auto_map", {{"AutoTokenizer", "x.Y"}}}},
  };
  for (const std::string type : {"llama", "qwen2", "qwen3", "qwen3_moe"}) {
    const DecoderConfig plain = parse(tiny_config(type));
    for (const Json& changes : harmless) {
      SCOPED_TRACE(type + " " + changes.dump());
      DecoderConfig config;
      ASSERT_NO_THROW(config = parse(tiny_config(type, changes)));
      EXPECT_EQ(config.rope.rope_theta, plain.rope.rope_theta);
      EXPECT_TRUE(std::holds_alternative<std::monostate>(config.rope.scaling));
      EXPECT_TRUE(config.sliding_windows().empty());
    }
  }
}

TEST(Config, RefusesByNameWhatItDoesNotHave) {
  struct Case {
    std::string key;  // named in the message, with the value
    std::string received;
    Json changes;
  };
  const std::vector<Case> cases = {
      {"model_type", "\"gpt2\"", {{"model_type", "gpt2"}}},
      {"use_sliding_window", "true", {{"use_sliding_window", true}}},
      {"layer_types", "sliding_attention", {{"layer_types", {"full_attention", "sliding_attention"}}}},
      {"layer_types", "full_attention", {{"layer_types", {"full_attention"}}}},
      {"attention_dropout", "0.1", {{"attention_dropout", 0.1}}},
      {"rope_parameters.rope_type",
       "\"longrope\"",
       {{"rope_parameters", {{"rope_type", "longrope"}, {"factor", 2.0}}}}},
      {"rope_parameters.factor", "no such key", {{"rope_parameters", {{"rope_type", "yarn"}}}}},
      {"rope_parameters.factor", "-1", {{"rope_parameters", {{"rope_type", "linear"}, {"factor", -1}}}}},
      {"rope_parameters.beta_fast",
       "1.0",
       {{"rope_parameters",
         {{"rope_type", "yarn"}, {"factor", 2.0}, {"beta_fast", 1.0}, {"beta_slow", 2.0}}}}},
      {"rope_parameters.truncate",
       "0",
       {{"rope_parameters", {{"rope_type", "yarn"}, {"factor", 2.0}, {"truncate", 0}}}}},
      {"rope_parameters.mscale",
       "2.0",
       {{"rope_parameters", {{"rope_type", "linear"}, {"factor", 2.0}, {"mscale", 2.0}}}}},
      {"rope_scaling.type",
       "\"dynamic\"",
       {{"rope_parameters", nullptr}, {"rope_scaling", {{"type", "dynamic"}, {"factor", 2.0}}}}},
      {"rope_scaling", "default", {{"rope_scaling", {{"type", "default"}}}}},  // beside rope_parameters
      {"rope_parameters.rope_theta", "500.0", {{"rope_theta", 7.0}}},          // two different angles
      {"rope_parameters.mrope_section", "[1,2]", {{"rope_parameters", {{"mrope_section", {1, 2}}}}}},
      {"rope_parameters.partial_rotary_factor",
       "0.5",
       {{"rope_parameters", {{"partial_rotary_factor", 0.5}}}}},
      {"partial_rotary_factor", "0.5", {{"partial_rotary_factor", 0.5}}},
      {"rope_interleaved", "true", {{"rope_interleaved", true}}},
      {"quantization_config", "gptq", {{"quantization_config", {{"quant_method", "gptq"}}}}},
      {"hidden_act", "\"gelu\"", {{"hidden_act", "gelu"}}},
      {"pretraining_tp", "2", {{"pretraining_tp", 2}}},
      {"is_encoder_decoder", "true", {{"is_encoder_decoder", true}}},
      {"add_cross_attention", "true", {{"add_cross_attention", true}}},
      {"pruned_heads", "a nested object", {{"pruned_heads", {{"0", {1}}}}}},
      {"auto_map", "AutoModelForCausalLM", {{"auto_map", {{"AutoModelForCausalLM", "x.Y"}}}}},
      {"logit_scale", "0.5", {{"logit_scale", 0.5}}},  // a key of another family
      {"vocab_size", "0", {{"vocab_size", 0}}},
      {"vocab_size", "37.5", {{"vocab_size", 37.5}}},
      {"hidden_size", "null", {{"hidden_size", nullptr}}},
      {"hidden_size", "4294967296", {{"hidden_size", int64_t{1} << 32}}},
      {"num_key_value_heads", "3", {{"num_key_value_heads", 3}}},
      {"head_dim", "5", {{"head_dim", 5}}},
      {"rms_norm_eps", "0", {{"rms_norm_eps", 0}}},
      {"rms_norm_eps", "\"1e-5\"", {{"rms_norm_eps", "1e-5"}}},
      {"tie_word_embeddings", "1", {{"tie_word_embeddings", 1}}},
  };
  for (const Case& refused : cases) {
    SCOPED_TRACE(refused.changes.dump());
    const std::string message = refusal(tiny_config("llama", refused.changes));
    EXPECT_EQ(message.rfind("FOLDER/config.json: " + refused.key, 0), 0u) << message;
    EXPECT_NE(message.find(refused.received), std::string::npos) << message;
  }
  EXPECT_NE(refusal(tiny_config("llama", {{"sliding_window", 64}})), "");
  EXPECT_NE(refusal(tiny_config("qwen2", {{"attention_bias", false}})), "");
  EXPECT_NE(refusal(tiny_config("qwen3", {{"mlp_bias", true}})), "");
}

TEST(Config, ReadsQwen3Moe) {
  const DecoderConfig config = parse(tiny_config("qwen3_moe"));
  EXPECT_EQ(
      *config.moe(),
      (MoeSpec{
          .num_experts = 5, .num_experts_per_tok = 2, .moe_intermediate_size = 7, .norm_topk_prob = true}));
  EXPECT_EQ(layers_with<MoeSpec>(config), std::vector<int64_t>{1});
  EXPECT_TRUE(config.attention()->query_key_norm);
  const auto layers = [](const Json& changes) {
    Json json = tiny_config("qwen3_moe", {{"num_hidden_layers", 5}, {"decoder_sparse_step", nullptr}});
    json.update(changes);
    return layers_with<MoeSpec>(parse(json));
  };
  using Layers = std::vector<int64_t>;
  EXPECT_EQ(layers(Json::object()), (Layers{0, 1, 2, 3, 4}));
  EXPECT_EQ(layers({{"mlp_only_layers", {0, 3}}}), (Layers{1, 2, 4}));
  EXPECT_EQ(layers({{"decoder_sparse_step", 2}, {"mlp_only_layers", {1}}}), (Layers{3}));
  // Transformers 5 writes num_local_experts.
  const Json renamed = tiny_config("qwen3_moe", {{"num_experts", nullptr}, {"num_local_experts", 6}});
  EXPECT_EQ(parse(renamed).moe()->num_experts, 6);
  EXPECT_FALSE(parse(tiny_config("qwen3_moe", {{"norm_topk_prob", nullptr}})).moe()->norm_topk_prob);
}

TEST(Config, ReadsGlm4Moe) {
  const DecoderConfig config = parse(tiny_config("glm4_moe"));
  EXPECT_EQ(*config.moe(), (MoeSpec{.num_experts = 6,
                                    .num_experts_per_tok = 2,
                                    .moe_intermediate_size = 7,
                                    .scores = RouterScores::kSigmoid,
                                    .norm_topk_prob = true,
                                    .routed_scaling_factor = 1.25,
                                    .correction_bias = true,
                                    .n_group = 3,
                                    .topk_group = 2,
                                    .shared_intermediate_size = 14}));
  EXPECT_EQ(layers_with<MoeSpec>(config), std::vector<int64_t>{1});
  EXPECT_EQ(config.attention()->rotary_dim, 4);
  EXPECT_EQ(config.num_prediction_layers, 1);
  EXPECT_TRUE(config.attention()->query_key_norm);
  EXPECT_EQ(parse(tiny_config("glm4_moe", {{"rms_norm_eps", nullptr}})).rms_norm_eps, 1e-5);
  const AttentionSpec biased =
      *parse(tiny_config("glm4_moe", {{"attention_bias", true}, {"use_qk_norm", nullptr}})).attention();
  EXPECT_TRUE(biased.bias && !biased.output_bias && !biased.query_key_norm);
  for (const Json& factor : {Json{{"partial_rotary_factor", 0.25}},
                             Json{{"rope_parameters", {{"partial_rotary_factor", 0.25}}}}}) {
    EXPECT_EQ(parse(tiny_config("glm4_moe", factor)).attention()->rotary_dim, 2);
  }
}

TEST(Config, RefusesExpertsThatItDoesNotHave) {
  struct Case {
    std::string type, key;
    Json changes;
  };
  const std::vector<Case> cases = {
      {"qwen3_moe", "num_experts_per_tok", {{"num_experts_per_tok", 6}}},
      {"qwen3_moe", "num_local_experts", {{"num_experts", nullptr}}},
      {"qwen3_moe", "num_local_experts", {{"num_local_experts", 4}}},  // beside num_experts
      {"qwen3_moe", "moe_intermediate_size", {{"moe_intermediate_size", 0}}},
      {"qwen3_moe", "norm_topk_prob", {{"norm_topk_prob", 1}}},
      {"qwen3_moe", "decoder_sparse_step", {{"decoder_sparse_step", 0}}},
      {"qwen3_moe", "mlp_only_layers", {{"mlp_only_layers", {2}}}},
      {"qwen3_moe", "mlp_only_layers", {{"mlp_only_layers", 1}}},
      {"qwen3_moe", "router_jitter_noise", {{"router_jitter_noise", 0.01}}},
      {"qwen3_moe", "expert_capacity", {{"expert_capacity", 64}}},
      {"qwen3_moe", "partial_rotary_factor", {{"partial_rotary_factor", 0.5}}},
      {"qwen3_moe", "n_group", {{"n_group", 1}}},  // a key of glm4_moe
      {"glm4_moe", "decoder_sparse_step", {{"decoder_sparse_step", 1}}},
      {"glm4_moe", "n_group", {{"n_group", 4}}},
      {"glm4_moe", "n_group", {{"n_group", 6}}},  // of one expert each
      {"glm4_moe", "topk_group", {{"topk_group", 4}}},
      {"glm4_moe", "num_experts_per_tok", {{"num_experts_per_tok", 3}, {"topk_group", 1}}},
      {"glm4_moe", "first_k_dense_replace", {{"first_k_dense_replace", -1}}},
      {"glm4_moe", "routed_scaling_factor", {{"routed_scaling_factor", 0}}},
      {"glm4_moe", "partial_rotary_factor", {{"partial_rotary_factor", 0.4}}},  // 3 of 8
      {"glm4_moe", "partial_rotary_factor", {{"partial_rotary_factor", 1.5}}},
      {"glm4_moe",
       "rope_parameters.partial_rotary_factor",
       {{"partial_rotary_factor", 0.5}, {"rope_parameters", {{"partial_rotary_factor", 0.25}}}}},
      {"llama", "num_experts", {{"num_experts", 4}}},
  };
  for (const Case& refused : cases) {
    SCOPED_TRACE(refused.changes.dump());
    const std::string message = refusal(tiny_config(refused.type, refused.changes));
    EXPECT_EQ(message.rfind("FOLDER/config.json: " + refused.key, 0), 0u) << message;
  }
}

std::vector<bool> sliding_layers(const std::string& type, const Json& changes) {
  Json all = {{"num_hidden_layers", 4}};
  all.update(changes);
  std::vector<bool> sliding;
  for (const int64_t window : windows_of(parse(tiny_config(type, all)))) sliding.push_back(window > 0);
  return sliding;
}

TEST(Config, KnowsWhichLayersHaveAWindow) {
  using Layers = std::vector<bool>;
  const Json types = {"full_attention", "sliding_attention", "sliding_attention", "full_attention"};
  for (const std::string type : {"qwen2", "qwen3"}) {
    const Json on = {{"use_sliding_window", true}, {"sliding_window", 7}, {"max_window_layers", 3}};
    EXPECT_EQ(sliding_layers(type, on), (Layers{false, false, false, true}));
    EXPECT_EQ(
        parse(tiny_config(type, {{"use_sliding_window", true}, {"max_window_layers", 0}})).sliding_windows(),
        std::vector<int64_t>{4096});
    const auto with = [&](const Json& changes) {
      Json all = on;
      all.update(changes);
      return sliding_layers(type, all);
    };
    EXPECT_EQ(with({{"max_window_layers", 0}}), Layers(4, true));
    EXPECT_EQ(with({{"max_window_layers", 4}}), Layers(4));
    EXPECT_EQ(with({{"layer_types", types}}), (Layers{false, true, true, false}));
    EXPECT_EQ(with({{"sliding_window", nullptr}}), Layers(4));
    EXPECT_EQ(with({{"use_sliding_window", false}}), Layers(4));
  }
  EXPECT_EQ(sliding_layers("mistral", {{"sliding_window", 7}}), Layers(4, true));
  EXPECT_EQ(sliding_layers("mistral", Json::object()), Layers(4, true));
  EXPECT_EQ(sliding_layers("mistral", {{"sliding_window", nullptr}}), Layers(4));
  EXPECT_EQ(parse(tiny_config("mistral", {{"sliding_window", 7}})).sliding_windows(),
            std::vector<int64_t>{7});
  const Json no_rope = {{"rope_parameters", nullptr}};
  const auto olmo3 = [&](Json changes) {
    changes.update(no_rope);
    return sliding_layers("olmo3", changes);
  };
  EXPECT_EQ(olmo3(Json::object()), (Layers{true, true, true, false}));
  EXPECT_EQ(olmo3({{"layer_types", types}}), (Layers{false, true, true, false}));
}

TEST(Config, RefusesWindowsThatAreUnclear) {
  const auto refused_key = [](const std::string& type, const Json& changes) {
    const std::string message = refusal(tiny_config(type, changes)), prefix = "FOLDER/config.json: ";
    EXPECT_EQ(message.rfind(prefix, 0), 0u) << message;
    return message.substr(prefix.size(), message.find(':', prefix.size()) - prefix.size());
  };
  const Json sliding = {"sliding_attention", "full_attention"}, none = {{"rope_parameters", nullptr}};
  EXPECT_EQ(refused_key("qwen2", {{"layer_types", sliding}}), "layer_types");
  EXPECT_EQ(
      refused_key("qwen3",
                  {{"layer_types", sliding}, {"use_sliding_window", true}, {"sliding_window", nullptr}}),
      "layer_types");
  EXPECT_EQ(
      refused_key("qwen2", {{"use_sliding_window", true}, {"sliding_window", 0}, {"max_window_layers", 0}}),
      "sliding_window");
  EXPECT_EQ(refused_key("qwen2", {{"use_sliding_window", true}, {"max_window_layers", -1}}),
            "max_window_layers");
  EXPECT_EQ(refused_key("mistral", {{"layer_types", sliding}}), "layer_types");
  EXPECT_EQ(refused_key("mistral", {{"use_sliding_window", false}}), "use_sliding_window");
  EXPECT_EQ(refused_key("mistral", {{"attention_bias", true}}), "attention_bias");
  EXPECT_EQ(refused_key("mistral", {{"layer_types", {"full_attention", "linear_attention"}}}), "layer_types");
  const auto olmo3 = [&](Json changes) {
    Json all = none;
    all.update(changes);
    return refused_key("olmo3", all);
  };
  EXPECT_EQ(olmo3({{"sliding_window", nullptr}}), "sliding_window");
  EXPECT_EQ(olmo3({{"rope_theta", 10000.0}}), "rope_theta");
  EXPECT_EQ(olmo3({{"rope_parameters", {{"rope_type", "default"}}}}),
            "rope_parameters.rope_type = \"default\"");
  EXPECT_EQ(olmo3({{"rope_parameters",
                    {{"full_attention", {{"rope_type", "yarn"}, {"factor", 2.0}, {"truncate", false}}}}}}),
            "rope_parameters.full_attention.truncate");
}

TEST(Config, ReadsYarnAndLinearRopes) {
  const auto rope = [](const Json& scaling) {
    Json parameters = {{"rope_theta", 500.0}};
    parameters.update(scaling);
    return parse(tiny_config("llama", {{"rope_parameters", parameters}})).rope.scaling;
  };
  EXPECT_EQ(std::get<LinearRope>(rope({{"rope_type", "linear"}, {"factor", 2.5}})).factor, 2.5);
  const Json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}};
  const auto with = [&](const Json& changes) {
    Json all = yarn;
    all.update(changes);
    return std::get<YarnRope>(rope(all));
  };
  const YarnRope plain = with(Json::object());
  EXPECT_EQ(plain.factor, 4);
  EXPECT_EQ(plain.original_max_position_embeddings, 128);
  EXPECT_EQ(std::pair(plain.beta_fast, plain.beta_slow), std::pair(32.0, 1.0));
  EXPECT_TRUE(plain.truncate);
  EXPECT_DOUBLE_EQ(plain.attention_factor, 0.1 * std::log(4) + 1);
  EXPECT_EQ(with({{"attention_factor", 1.5}, {"mscale", 2.0}, {"mscale_all_dim", 1.0}}).attention_factor,
            1.5);
  EXPECT_DOUBLE_EQ(with({{"mscale", 2.0}, {"mscale_all_dim", 1.0}}).attention_factor,
                   (0.2 * std::log(4) + 1) / (0.1 * std::log(4) + 1));
  EXPECT_DOUBLE_EQ(with({{"mscale", 2.0}, {"mscale_all_dim", 0}}).attention_factor, 0.1 * std::log(4) + 1);
  EXPECT_EQ(with({{"factor", 0.5}}).attention_factor, 1);
  EXPECT_FALSE(with({{"truncate", false}}).truncate);
}

TEST(Config, Olmo3HasARopeForEachTypeOfLayer) {
  const DecoderConfig plain = parse(tiny_config("olmo3", {{"rope_parameters", nullptr}}));
  EXPECT_EQ(plain.rope.rope_theta, 500000);
  EXPECT_EQ(plain.sliding_rope.value().rope_theta, 500000);
  EXPECT_TRUE(plain.layers[0].norm_outputs && plain.attention()->query_key_norm &&
              plain.attention()->query_key_norm_over_heads);
  const Json yarn = {{"rope_type", "yarn"}, {"factor", 8.0}, {"original_max_position_embeddings", 64}};
  const Json version5 = {{"full_attention", yarn}, {"sliding_attention", {{"rope_theta", 7.0}}}};
  const DecoderConfig both = parse(tiny_config("olmo3", {{"rope_parameters", version5}}));
  EXPECT_EQ(std::get<YarnRope>(both.rope.scaling).factor, 8);
  EXPECT_EQ(both.rope.rope_theta, 500000);
  EXPECT_EQ(both.sliding_rope.value().rope_theta, 7);
  const DecoderConfig version4 = parse(
      tiny_config("olmo3", {{"rope_parameters", nullptr}, {"rope_scaling", yarn}, {"rope_theta", 500000.0}}));
  EXPECT_TRUE(std::holds_alternative<YarnRope>(version4.rope.scaling));
  EXPECT_TRUE(std::holds_alternative<std::monostate>(version4.sliding_rope.value().scaling));
}

TEST(Config, FaultyFilesAreNamed) {
  const ScratchFolder folder;
  const auto message = [&] { return message_of<InputError>([&] { read_config(folder.path()); }); };
  EXPECT_NE(message().find("config.json"), std::string::npos);
  for (const std::string& text : {std::string("{\"model_type\": "), std::string("[]"), std::string(),
                                  std::string(100000, '['), std::string("{\"vocab_size\": 1e999}")}) {
    write(folder / "config.json", text);
    EXPECT_NE(message().find((folder / "config.json").string()), std::string::npos) << text.substr(0, 20);
  }
}

TEST(Config, SetsTheDtypeKeyThatIsThere) {
  const ScratchFolder folder;
  const std::filesystem::path path = folder / "config.json";
  const auto rewritten = [&](const std::string& text) {
    write(path, text);
    return Json::parse(config_with_dtype(path, "float64")).dump();
  };
  EXPECT_EQ(rewritten(R"({"b":1e-05,"dtype":"float32","a":2})"), R"({"b":1e-05,"dtype":"float64","a":2})");
  EXPECT_EQ(rewritten(R"({"torch_dtype":"bfloat16","a":2})"), R"({"torch_dtype":"float64","a":2})");
  EXPECT_EQ(rewritten(R"({"a":2})"), R"({"a":2,"dtype":"float64"})");
}

}  // namespace
}  // namespace espalier
