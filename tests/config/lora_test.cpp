// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/lora.h"

#include <gtest/gtest.h>

#include <cmath>

#include "espalier/base/check.h"
#include "tests/base/message_of.h"
#include "tests/config/tiny_config.h"

namespace espalier::testing {
namespace {

using Names = std::vector<std::string>;

ModelSpec spec_of(const std::string& model_type) {
  return parse(tiny_config(model_type));
}

Names names_of(const std::vector<LinearMap>& maps) {
  Names names;
  for (const LinearMap& map : maps) names.push_back(map.name);
  return names;
}

TEST(Lora, ScaleIsAlphaOverRankOrItsRoot) {
  EXPECT_DOUBLE_EQ(lora_scale({.rank = 4, .alpha = 6}), 1.5);
  EXPECT_DOUBLE_EQ(lora_scale({.rank = 4, .alpha = 6, .rslora = true}), 3);
}

TEST(Lora, TargetsAreMapsByTheEndOfTheirNames) {
  const ModelSpec spec = spec_of("llama");
  const std::string layer = "model.layers.1.";
  EXPECT_EQ(names_of(adapted_maps(spec, {"v_proj", "q_proj"})),
            (Names{"model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj",
                   layer + "self_attn.q_proj", layer + "self_attn.v_proj"}));
  EXPECT_EQ(names_of(adapted_maps(spec, {"layers.1.mlp.down_proj"})), (Names{layer + "mlp.down_proj"}));
  const std::vector<LinearMap> down = adapted_maps(spec, {"down_proj"});
  EXPECT_EQ(down[0].in, 24);
  EXPECT_EQ(down[0].out, 16);
  EXPECT_EQ(adapted_maps(spec, {kAllLinear}).size(), 14u);
  EXPECT_EQ(target_names(spec, adapted_maps(spec, {kAllLinear})),
            (Names{"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}));
  EXPECT_EQ(names_of(adapted_maps(spec, {"lm_head"})), Names{"lm_head"});
  EXPECT_EQ(adapted_maps(spec, {kAllLinear, "lm_head"}).size(), 15u);
}

// In Transformers routers and experts are no linear modules. PEFT takes other maps that are called like those
// of experts for experts.
TEST(Lora, MlpsAndRoutersOfModelsWithExpertsHaveNone) {
  const ModelSpec spec = spec_of("glm4_moe");
  EXPECT_EQ(target_names(spec, adaptable_maps(spec)),
            (Names{"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"}));
  for (const char* name : {"gate_proj", "shared_experts.gate_proj", "mlp.gate"}) {
    const std::string message = message_of<InputError>([&] { adapted_maps(spec, {name}); });
    EXPECT_NE(message.find("which cannot have an adapter; those that can: k_proj, lm_head"),
              std::string::npos)
        << message;
  }
}

TEST(Lora, TheOutputOfMamba2HasNone) {
  const ModelSpec spec{.layers = {{SsmSpec{.name = "mixer"}, NoMlp{}}}};
  EXPECT_EQ(target_names(spec, adapted_maps(spec, {kAllLinear})), Names{"in_proj"});
}

// Names of some maps must not find the others.
TEST(Lora, TargetNamesOfSomeLayersNameThem) {
  const ModelSpec spec = spec_of("llama");
  const std::vector<LinearMap> maps = adapted_maps(spec, {"layers.1.self_attn.q_proj", "v_proj"});
  EXPECT_EQ(target_names(spec, maps), (Names{"v_proj", "model.layers.1.self_attn.q_proj"}));
  EXPECT_EQ(names_of(adapted_maps(spec, target_names(spec, maps))), names_of(maps));
}

TEST(Lora, RefusesWhatIsNotThere) {
  const ModelSpec spec = spec_of("llama");
  EXPECT_EQ(
      message_of<InputError>([&] { adapted_maps(spec, {"q_proj", "query"}); }),
      "lora-targets: the model has no linear map `query`; it has: down_proj, gate_proj, k_proj, lm_head, "
      "o_proj, q_proj, up_proj, v_proj, all-linear");
  EXPECT_NE(message_of<InputError>([&] {
              adapted_maps(spec, {"embed_tokens"});
            }).find("`embed_tokens` selects model.embed_tokens, which"),
            std::string::npos);
  EXPECT_THROW(adapted_maps(spec, {"proj"}), InputError);  // whole parts of a name
  EXPECT_NE(message_of<InputError>([] {
              check_lora_options({.rank = 0, .alpha = 1, .targets = {"q_proj"}});
            }).find("at least 1, received 0"),
            std::string::npos);
  EXPECT_THROW(check_lora_options({.rank = 1, .alpha = 0, .targets = {"q_proj"}}), InputError);
  EXPECT_THROW(check_lora_options({.rank = 1, .alpha = std::nan(""), .targets = {"q_proj"}}), InputError);
  EXPECT_THROW(check_lora_options({.rank = 1, .alpha = 1, .targets = {}}), InputError);
}

}  // namespace
}  // namespace espalier::testing
