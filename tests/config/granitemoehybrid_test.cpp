// SPDX-License-Identifier: Apache-2.0
// The family granitemoehybrid: state spaces and attention by layer, experts or a shared MLP alone.
#include <gtest/gtest.h>

#include <map>

#include "espalier/base/check.h"
#include "espalier/config/layer_spec.h"
#include "tests/base/message_of.h"
#include "tests/config/tiny_config.h"

namespace espalier {
namespace {

using testing::message_of;
using testing::parse;
using Json = nlohmann::ordered_json;

// The keys of released models, with small sizes.
Json tiny_granite(const Json& changes = Json::object()) {
  Json config = {{"architectures", {"GraniteMoeHybridForCausalLM"}},
                 {"model_type", "granitemoehybrid"},
                 {"vocab_size", 37},
                 {"hidden_size", 16},
                 {"intermediate_size", 6},
                 {"num_hidden_layers", 3},
                 {"num_attention_heads", 4},
                 {"num_key_value_heads", 2},
                 {"layer_types", {"mamba", "attention", "mamba"}},
                 {"position_embedding_type", "nope"},
                 {"rope_theta", 10000},
                 {"rope_scaling", nullptr},
                 {"attention_bias", false},
                 {"attention_multiplier", 0.0078125},
                 {"embedding_multiplier", 12},
                 {"residual_multiplier", 0.22},
                 {"logits_scaling", 6},
                 {"init_method", "mup"},
                 {"normalization_function", "rmsnorm"},
                 {"mamba_chunk_size", 256},
                 {"mamba_conv_bias", true},
                 {"mamba_d_conv", 4},
                 {"mamba_d_head", 8},
                 {"mamba_d_state", 5},
                 {"mamba_expand", 2},
                 {"mamba_n_groups", 1},
                 {"mamba_n_heads", 4},
                 {"mamba_proj_bias", false},
                 {"num_local_experts", 3},
                 {"num_experts_per_tok", 2},
                 {"shared_intermediate_size", 10},
                 {"output_router_logits", false},
                 {"router_aux_loss_coef", 0.01},
                 {"tie_word_embeddings", true}};
  config.update(changes);
  return config;
}

TEST(GraniteMoeHybrid, LayersOfTwoKindsWithoutPositions) {
  const DecoderConfig config = parse(tiny_granite());
  EXPECT_EQ(testing::layers_with<SsmSpec>(config), (std::vector<int64_t>{0, 2}));
  EXPECT_EQ(router_shape(config).layers, (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(config.embedding_multiplier, 12);
  EXPECT_EQ(config.residual_multiplier, 0.22);
  EXPECT_EQ(config.logits_scaling, 6);
  const ModelSpec& spec = config;
  const auto& attention = std::get<AttentionSpec>(spec.layers[1].mixer);
  EXPECT_FALSE(attention.rotary);
  EXPECT_EQ(attention.attention_multiplier, 0.0078125);
  EXPECT_EQ(attention.head_dim, 4);
  EXPECT_EQ(std::get<SsmSpec>(spec.layers[0].mixer).projection_size(), 32 + 32 + 2 * 5 + 4);
  EXPECT_TRUE(std::get<MoeSpec>(spec.layers[0].mlp).norm_topk_prob);
}

TEST(GraniteMoeHybrid, NamesOfLayerTypesAreOldOrNew) {
  for (const char* key : {"layer_types", "layers_block_type"}) {
    Json config = tiny_granite({{"layer_types", nullptr}});
    config[key] = {"full_attention", "linear_attention", "attention"};
    EXPECT_EQ(testing::layers_with<SsmSpec>(parse(config)), std::vector<int64_t>{1}) << key;
  }
  EXPECT_EQ(testing::layers_with<SsmSpec>(parse(tiny_granite({{"layer_types", nullptr}}))),
            (std::vector<int64_t>{0, 1, 2}));
}

TEST(GraniteMoeHybrid, RopeIsThereWhereItIsNamed) {
  const DecoderConfig config =
      parse(tiny_granite({{"position_embedding_type", "rope"}, {"rope_theta", 500}}));
  EXPECT_TRUE(config.attention()->rotary);
  EXPECT_EQ(config.rope.rope_theta, 500);
  EXPECT_FALSE(parse(tiny_granite({{"position_embedding_type", nullptr}})).attention()->rotary);
}

TEST(GraniteMoeHybrid, ParametersOfLayers) {
  const auto shapes_of = [](const Json& json) {
    std::map<std::string, std::vector<int64_t>> shapes;
    for (const ParameterShape& parameter : parameter_shapes(parse(json)))
      shapes[parameter.name] = parameter.shape;
    return shapes;
  };
  auto shapes = shapes_of(tiny_granite());
  const std::string layer = "model.layers.0.";
  EXPECT_EQ(shapes.at(layer + "mamba.in_proj.weight"), (std::vector<int64_t>{78, 16}));
  EXPECT_EQ(shapes.at(layer + "block_sparse_moe.router.layer.weight"), (std::vector<int64_t>{3, 16}));
  EXPECT_EQ(shapes.at(layer + "block_sparse_moe.experts.2.input_linear.weight"),
            (std::vector<int64_t>{12, 16}));
  EXPECT_EQ(shapes.at(layer + "shared_mlp.output_linear.weight"), (std::vector<int64_t>{16, 10}));
  EXPECT_TRUE(shapes.contains(layer + "input_layernorm.weight"));
  EXPECT_FALSE(shapes.contains("lm_head.weight"));
  shapes = shapes_of(tiny_granite({{"num_local_experts", 0}}));
  EXPECT_EQ(shapes.at(layer + "shared_mlp.input_linear.weight"), (std::vector<int64_t>{20, 16}));
  EXPECT_FALSE(shapes.contains(layer + "block_sparse_moe.router.layer.weight"));
  EXPECT_TRUE(router_shape(parse(tiny_granite({{"num_local_experts", 0}}))).layers.empty());
}

TEST(GraniteMoeHybrid, RefusalsNameTheKey) {
  const auto expect_refused = [](const std::string& key, const Json& value) {
    const std::string message = message_of<InputError>([&] { parse(tiny_granite({{key, value}})); });
    EXPECT_NE(message.find("FOLDER/config.json: " + key), std::string::npos) << key << ": " << message;
  };
  expect_refused("layer_types", {"mamba", "attention"});
  expect_refused("layer_types", {"mamba", "attention", "sliding_attention"});
  expect_refused("layers_block_type", {"mamba", "mamba", "mamba"});
  expect_refused("position_embedding_type", "alibi");
  expect_refused("mamba_n_heads", 5);
  expect_refused("num_experts_per_tok", 4);
  expect_refused("normalization_function", "layernorm");
  expect_refused("residual_multiplier", 0);
  expect_refused("sliding_window", 4);
  expect_refused("mlp_bias", true);
  expect_refused("num_experts", 4);
}

}  // namespace
}  // namespace espalier
