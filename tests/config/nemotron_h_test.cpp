// SPDX-License-Identifier: Apache-2.0
// The family nemotron_h: each layer is a mixer or an MLP.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "espalier/base/check.h"
#include "espalier/config/layer_spec.h"
#include "espalier/config/lora.h"
#include "tests/base/message_of.h"
#include "tests/config/tiny_config.h"

namespace espalier {
namespace {

using testing::layers_with;
using testing::message_of;
using testing::parse;
using Json = nlohmann::ordered_json;
using Layers = std::vector<int64_t>;

Json tiny_nemotron(const Json& changes = Json::object()) {
  Json config = {{"model_type", "nemotron_h"},
                 {"vocab_size", 37},
                 {"hidden_size", 16},
                 {"intermediate_size", 24},
                 {"layers_block_type", {"linear_attention", "mlp", "full_attention", "moe"}},
                 {"num_attention_heads", 4},
                 {"num_key_value_heads", 2},
                 {"mamba_num_heads", 6},
                 {"mamba_head_dim", 3},
                 {"n_groups", 2},
                 {"n_routed_experts", 6},
                 {"num_experts_per_tok", 2},
                 {"moe_intermediate_size", 7},
                 {"moe_shared_expert_intermediate_size", 5}};
  config.update(changes);
  return config;
}

TEST(NemotronH, LayersAreNamedInThreeWays) {
  const Json released = {
      {"layers_block_type", nullptr}, {"num_hidden_layers", 4}, {"hybrid_override_pattern", "M-*E"}};
  const Json older = {{"layers_block_type", nullptr}, {"layer_types", {"mamba", "mlp", "attention", "moe"}}};
  for (const Json& changes : {Json::object(), released, older}) {
    SCOPED_TRACE(changes.dump());
    const DecoderConfig config = parse(tiny_nemotron(changes));
    EXPECT_EQ(layers_with<SsmSpec>(config), Layers{0});
    EXPECT_EQ(layers_with<DenseMlpSpec>(config), Layers{1});
    EXPECT_EQ(layers_with<AttentionSpec>(config), Layers{2});
    EXPECT_EQ(layers_with<MoeSpec>(config), Layers{3});
    EXPECT_EQ(layers_with<NoMixer>(config), (Layers{1, 3}));
    EXPECT_EQ(layers_with<NoMlp>(config), (Layers{0, 2}));
  }
}

TEST(NemotronH, ValuesAreThoseOfTransformers) {
  const DecoderConfig config = parse(tiny_nemotron({{"time_step_limit", {0.0, 9.0}}, {"pad_token_id", 1}}));
  EXPECT_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_EQ(config.pad_token_id, -1);
  EXPECT_EQ(config.rotary_dim(), 0);
  EXPECT_EQ(config.ssm()->inner_size(), 18);
  EXPECT_EQ(config.ssm()->least_time_step, 0.001);  // not time_step_limit
  EXPECT_TRUE(std::isinf(config.ssm()->most_time_step));
  EXPECT_EQ(config.attention()->num_key_value_heads, 2);
  EXPECT_EQ(config.attention()->head_dim, 128);
  EXPECT_EQ(config.moe()->scores, RouterScores::kSigmoid);
  EXPECT_EQ(config.moe()->num_experts_per_tok, 2);
  EXPECT_TRUE(config.ssm_init->rescale_prenorm_residual);
}

TEST(NemotronH, ParametersHaveTheNamesOfTheCheckpoint) {
  const DecoderConfig config = parse(tiny_nemotron());
  std::map<std::string, std::vector<int64_t>> shapes;
  for (const ParameterShape& parameter : parameter_shapes(config)) shapes[parameter.name] = parameter.shape;
  const std::string layers = "backbone.layers.";
  EXPECT_EQ(shapes.at(layers + "0.mixer.in_proj.weight")[1], 16);
  EXPECT_EQ(shapes.at(layers + "1.mixer.up_proj.weight"), (Layers{24, 16}));
  EXPECT_EQ(shapes.at(layers + "2.mixer.o_proj.weight"), (Layers{16, 512}));
  EXPECT_EQ(shapes.at(layers + "3.mixer.experts.5.down_proj.weight"), (Layers{16, 7}));
  EXPECT_EQ(shapes.at(layers + "3.mixer.shared_experts.up_proj.weight"), (Layers{5, 16}));
  for (const char* norm : {"0.norm", "1.norm", "2.norm", "3.norm"})
    EXPECT_EQ(shapes.at(layers + norm + ".weight"), Layers{16});
  EXPECT_FALSE(shapes.contains(layers + "1.mixer.gate_proj.weight"));
  EXPECT_EQ(buffer_shapes(config).at(0).name, layers + "3.mixer.gate.e_score_correction_bias");
  EXPECT_EQ(buffer_shapes(config).size(), 1u);
}

// Transformers calls the backbone model. Experts are no modules there, and shared ones can have adapters.
TEST(NemotronH, AdaptersHaveTheNamesOfTransformers) {
  const DecoderConfig config = parse(tiny_nemotron());
  const std::vector<LinearMap> all = adapted_maps(config, {kAllLinear});
  EXPECT_EQ(all.at(0).name, "backbone.layers.0.mixer.in_proj");
  EXPECT_EQ(
      target_names(config, all),
      (std::vector<std::string>{"in_proj", "mixer.up_proj", "mixer.down_proj", "q_proj", "k_proj", "v_proj",
                                "o_proj", "mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"}));
  EXPECT_EQ(module_name(config, all.at(0).name), "model.layers.0.mixer.in_proj");
  const DecoderConfig two = parse(tiny_nemotron({{"layers_block_type", {"mamba", "mamba"}}}));
  EXPECT_EQ(target_names(two, adapted_maps(two, {"layers.1.mixer.in_proj"})),
            std::vector<std::string>{"model.layers.1.mixer.in_proj"});
}

TEST(NemotronH, RefusalsNameTheKey) {
  const auto expect_refused = [](const std::string& key, const Json& changes) {
    const std::string message = message_of<InputError>([&] { parse(tiny_nemotron(changes)); });
    EXPECT_EQ(message.find("FOLDER/config.json: " + key), 0u) << changes.dump() << ": " << message;
  };
  expect_refused("layers_block_type", {{"layers_block_type", {"mlp", "sliding_attention"}}});
  expect_refused("hybrid_override_pattern", {{"layers_block_type", nullptr}});
  expect_refused("hybrid_override_pattern",
                 {{"layers_block_type", nullptr}, {"hybrid_override_pattern", "M-x"}});
  expect_refused("num_hidden_layers", {{"num_hidden_layers", 5}});
  expect_refused("mamba_hidden_act", {{"mamba_hidden_act", "gelu"}});
  expect_refused("mlp_hidden_act", {{"mlp_hidden_act", "silu"}});
  expect_refused("mlp_bias", {{"mlp_bias", true}});
  expect_refused("moe_latent_size", {{"moe_latent_size", 8}});
  expect_refused("attention_bias", {{"attention_bias", true}});
  expect_refused("attention_head_dim", {{"attention_head_dim", 64}});
  expect_refused("attention_dropout", {{"attention_dropout", 0.1}});
  expect_refused("hidden_dropout", {{"hidden_dropout", 0.1}});
  expect_refused("tie_word_embeddings", {{"tie_word_embeddings", true}});
  expect_refused("sliding_window", {{"sliding_window", 4}});
  expect_refused("n_group", {{"n_group", 4}});
}

}  // namespace
}  // namespace espalier
