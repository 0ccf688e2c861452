// SPDX-License-Identifier: Apache-2.0
// The family mamba2: layers without attention and MLP.
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

const Json kInfinity = {{"__float__", "Infinity"}};

// The keys of released models of Transformers 4, with small sizes.
Json tiny_mamba2(const Json& changes = Json::object()) {
  Json config = {{"architectures", {"Mamba2ForCausalLM"}},
                 {"model_type", "mamba2"},
                 {"vocab_size", 37},
                 {"hidden_size", 16},
                 {"intermediate_size", 48},
                 {"num_hidden_layers", 3},
                 {"num_heads", 6},
                 {"head_dim", 8},
                 {"expand", 3},
                 {"state_size", 5},
                 {"n_groups", 2},
                 {"conv_kernel", 4},
                 {"chunk_size", 256},
                 {"hidden_act", "silu"},
                 {"layer_norm_epsilon", 1e-4},
                 {"norm_before_gate", true},
                 {"rms_norm", true},
                 {"residual_in_fp32", true},
                 {"rescale_prenorm_residual", false},
                 {"time_step_floor", 0.0001},
                 {"time_step_init_scheme", "random"},
                 {"time_step_limit", {0.0, kInfinity}},
                 {"time_step_max", 0.1},
                 {"time_step_min", 0.001},
                 {"time_step_rank", 256},
                 {"time_step_scale", 1.0},
                 {"tie_word_embeddings", false},
                 {"torch_dtype", "bfloat16"},
                 {"use_bias", false},
                 {"use_conv_bias", true}};
  config.update(changes);
  return config;
}

TEST(Mamba2, LayersHaveNoMlpAndNoPositions) {
  const DecoderConfig config = parse(tiny_mamba2());
  EXPECT_EQ(testing::layers_with<SsmSpec>(config), (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(config.rms_norm_eps, 1e-4);
  EXPECT_TRUE(config.residual_in_fp32);
  EXPECT_EQ(parse(tiny_mamba2({{"pad_token_id", 2}})).pad_token_id, -1);  // Transformers trains its row, too
  EXPECT_FALSE(config.layers[0].has_mlp());
  const auto& ssm = std::get<SsmSpec>(config.layers[0].mixer);
  EXPECT_EQ(ssm.inner_size(), 48);
  EXPECT_EQ(ssm.conv_size(), 48 + 2 * 2 * 5);
  EXPECT_EQ(ssm.projection_size(), 48 + 68 + 6);
  EXPECT_EQ(ssm.least_time_step, 0);
  EXPECT_TRUE(std::isinf(ssm.most_time_step));
}

TEST(Mamba2, ParametersHaveTheNamesOfTheCheckpoint) {
  std::vector<std::string> names;
  for (const ParameterShape& parameter :
       parameter_shapes(parse(tiny_mamba2({{"num_hidden_layers", 1}, {"use_bias", true}})))) {
    names.push_back(parameter.name);
  }
  const std::string layer = "backbone.layers.0.", mixer = layer + "mixer.";
  EXPECT_EQ(names,
            (std::vector<std::string>{"backbone.embeddings.weight", mixer + "dt_bias", mixer + "A_log",
                                      mixer + "D", mixer + "conv1d.weight", mixer + "conv1d.bias",
                                      mixer + "in_proj.weight", mixer + "in_proj.bias", mixer + "norm.weight",
                                      mixer + "out_proj.weight", mixer + "out_proj.bias",
                                      layer + "norm.weight", "backbone.norm_f.weight", "lm_head.weight"}));
}

TEST(Mamba2, DefaultsAreThoseOfTransformers) {
  const DecoderConfig config =
      parse({{"model_type", "mamba2"}, {"vocab_size", 9}, {"hidden_size", 4096}, {"num_hidden_layers", 1}});
  EXPECT_EQ(*config.ssm(),
            (SsmSpec{.num_heads = 128, .head_dim = 64, .state_size = 128, .n_groups = 8, .conv_kernel = 4}));
  EXPECT_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_EQ(config.initializer_range, 0.1);
}

TEST(Mamba2, LimitsOfSteps) {
  const DecoderConfig config = parse(tiny_mamba2({{"time_step_limit", {0.01, 0.5}}}));
  EXPECT_EQ(config.ssm()->least_time_step, 0.01);
  EXPECT_EQ(config.ssm()->most_time_step, 0.5);
}

TEST(Mamba2, RefusalsNameTheKey) {
  const auto expect_refused = [](const std::string& key, const Json& value) {
    const std::string message = message_of<InputError>([&] { parse(tiny_mamba2({{key, value}})); });
    EXPECT_NE(message.find("FOLDER/config.json: " + key), std::string::npos) << key << ": " << message;
  };
  expect_refused("num_heads", 5);
  expect_refused("n_groups", 4);
  expect_refused("conv_kernel", 9);
  expect_refused("intermediate_size", 32);
  expect_refused("rms_norm", false);
  expect_refused("hidden_act", "gelu");
  expect_refused("time_step_limit", {0.0});
  expect_refused("time_step_limit", {0.5, 0.1});
  expect_refused("time_step_limit", {kInfinity, 0.1});
  expect_refused("time_step_limit", {0.0, "Infinity"});
  expect_refused("time_step_limit", {1e308, kInfinity});
  expect_refused("time_step_limit", {kInfinity, kInfinity});
  expect_refused("time_step_limit", {0.0, 1e308});
  expect_refused("use_conv_bias", 1);
  expect_refused("num_attention_heads", 4);
  expect_refused("rope_theta", 1e4);
  expect_refused("sliding_window", 8);
}

}  // namespace
}  // namespace espalier
