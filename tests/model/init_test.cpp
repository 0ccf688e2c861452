// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/init.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/safetensors.h"
#include "espalier/model/weights/weights.h"
#include "tests/base/message_of.h"
#include "tests/base/scratch_folder.h"
#include "tests/model/tiny_models.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::message_of;
using testing::ScratchFolder;
using testing::tiny_config;
using Json = nlohmann::ordered_json;

class Init : public ::testing::Test {
 protected:
  InitOptions options(const std::string& out, const Json& changes = Json::object()) {
    const std::filesystem::path config = folder_ / (out + ".json");
    std::ofstream(config) << tiny_config("qwen2", changes).dump();
    return {.config = config, .out = folder_ / out, .seed = testing::test_seed(5)};
  }
  Decoder make(const InitOptions& options) {
    init_model(options);
    return load_decoder(options.out, options.dtype);
  }
  ScratchFolder folder_;
};

const at::Tensor& value(const Decoder& decoder, const std::string& name) {
  for (const Parameter& parameter : decoder.parameters()) {
    if (parameter.name == name) return parameter.value;
  }
  throw std::out_of_range(name);
}

TEST_F(Init, DrawsAsTransformersDoes) {
  const Decoder decoder =
      make(options("a", {{"vocab_size", 2000}, {"hidden_size", 64}, {"initializer_range", 0.5}}));
  for (const Parameter& parameter : decoder.parameters()) {
    const at::Tensor& tensor = parameter.value;
    if (parameter.name.ends_with("bias")) {
      EXPECT_TRUE(at::equal(tensor, at::zeros_like(tensor))) << parameter.name;
    } else if (parameter.name.find("norm") != std::string::npos) {
      EXPECT_TRUE(at::equal(tensor, at::ones_like(tensor))) << parameter.name;
    } else {
      EXPECT_NEAR(tensor.std().item<double>(), 0.5, 0.03) << parameter.name;
    }
  }
  // 128,000 values: the standard error of the fourth moment is about 0.03.
  const at::Tensor drawn = value(decoder, "model.embed_tokens.weight").flatten() / 0.5;
  EXPECT_NEAR(drawn.mean().item<double>(), 0, 0.015);
  EXPECT_NEAR(drawn.pow(2).mean().item<double>(), 1, 0.02);
  EXPECT_NEAR(drawn.pow(4).mean().item<double>(), 3, 0.15);
  const int64_t last = drawn.size(0) - 1;
  EXPECT_NEAR((drawn.narrow(0, 0, last) * drawn.narrow(0, 1, last)).mean().item<double>(), 0, 0.015);
}

// Sinks and the router's bias are drawn, the experts' biases are not.
TEST_F(Init, DrawsGptOssAsTransformersDoes) {
  const InitOptions made = options("gpt_oss");
  const Json sizes = {{"num_attention_heads", 400},
                      {"num_local_experts", 400},
                      {"intermediate_size", 4},
                      {"initializer_range", 0.5}};
  std::ofstream(made.config) << tiny_config("gpt_oss", sizes).dump();
  int drawn = 0;
  const Decoder decoder = make(made);
  for (const Parameter& parameter : decoder.parameters()) {
    const at::Tensor& tensor = parameter.value;
    if (parameter.name.ends_with("_proj_bias") || parameter.name.ends_with("_proj.bias")) {
      EXPECT_TRUE(at::equal(tensor, at::zeros_like(tensor))) << parameter.name;
    } else if (parameter.name.find("norm") != std::string::npos) {
      EXPECT_TRUE(at::equal(tensor, at::ones_like(tensor))) << parameter.name;
    } else {
      EXPECT_NEAR(tensor.std().item<double>(), 0.5, 0.1) << parameter.name;
      drawn += parameter.name.ends_with(".sinks") || parameter.name.ends_with(".router.bias");
    }
  }
  EXPECT_EQ(drawn, 2 * 2);
}

// As torch.nn.Linear initialises it only the output of Mamba-2, divided by the root of the number of layers.
TEST_F(Init, DrawsNemotronHAsTransformersDoes) {
  const InitOptions made = options("nemotron_h");
  const Json config = {{"model_type", "nemotron_h"},
                       {"vocab_size", 200},
                       {"hidden_size", 64},
                       {"intermediate_size", 48},
                       {"hybrid_override_pattern", "M-*E"},
                       {"num_attention_heads", 4},
                       {"num_key_value_heads", 2},
                       {"mamba_num_heads", 12},
                       {"mamba_head_dim", 4},
                       {"n_groups", 2},
                       {"n_routed_experts", 6},
                       {"num_experts_per_tok", 2},
                       {"moe_intermediate_size", 40},
                       {"initializer_range", 0.5}};
  std::ofstream(made.config) << config.dump();
  const Decoder decoder = make(made);
  for (const Parameter& parameter : decoder.parameters()) {
    if (parameter.value.dim() == 1) continue;
    const bool is_output = parameter.name.ends_with("mixer.out_proj.weight");
    const double expected = is_output ? 1 / std::sqrt(3.0 * 48 * 4) : 0.5;
    EXPECT_NEAR(parameter.value.std().item<double>() / expected, 1, 0.2) << parameter.name;
    if (is_output) {
      EXPECT_LT(parameter.value.abs().max().item<double>(), 1 / std::sqrt(48.0 * 4));
    }
  }
  EXPECT_TRUE(value(decoder, "backbone.layers.0.mixer.conv1d.bias").eq(0).all().item<bool>());
  const at::Tensor steps = at::softplus(value(decoder, "backbone.layers.0.mixer.dt_bias"));
  EXPECT_TRUE(steps.ge(0.0009).logical_and(steps.le(0.11)).all().item<bool>());
}

TEST_F(Init, IsTheSameInMemory) {
  const InitOptions made = options("a");
  init_model(made);
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const Decoder saved = load_decoder(made.out, dtype);
    const Decoder decoder = init_decoder(read_config(made.out), made.seed, dtype);
    ASSERT_EQ(decoder.parameters().size(), saved.parameters().size());
    for (size_t i = 0; i < decoder.parameters().size(); ++i) {
      const Parameter &ours = decoder.parameters()[i], &theirs = saved.parameters()[i];
      EXPECT_EQ(ours.name, theirs.name);
      EXPECT_EQ(ours.value.scalar_type(), dtype);
      EXPECT_TRUE(ours.value.requires_grad());
      EXPECT_TRUE(at::equal(ours.value, theirs.value)) << ours.name;
    }
  }
}

TEST_F(Init, ValuesDependOnSeedNameAndIndexOnly) {
  const Decoder a = make(options("a"));
  const Decoder same = make(options("same", {{"num_hidden_layers", 3}, {"vocab_size", 51}}));
  InitOptions other_seed = options("other");
  other_seed.seed = testing::test_seed(6);
  const Decoder b = make(other_seed);

  const std::string embedding = "model.embed_tokens.weight", up = "model.layers.1.mlp.up_proj.weight";
  EXPECT_TRUE(at::equal(value(a, up), value(same, up)));
  EXPECT_TRUE(at::equal(value(a, embedding), value(same, embedding).narrow(0, 0, 37)));
  EXPECT_FALSE(at::equal(value(a, up), value(b, up)));
  EXPECT_FALSE(at::equal(value(a, up), value(a, "model.layers.0.mlp.up_proj.weight")));
}

// So that a seed means the same model in every version.
TEST_F(Init, ValuesOfOneSeedArePinned) {
  const testing::PinnedSeeds pinned;
  const at::Tensor first = value(make(options("pinned")), "model.embed_tokens.weight").flatten();
  EXPECT_FLOAT_EQ(first[0].item<float>(), 0.0029366312f);
  EXPECT_FLOAT_EQ(first[1].item<float>(), 0.018101182f);
}

TEST_F(Init, DtypesAreRoundingsOfEachOther) {
  InitOptions exact = options("exact"), rounded = options("rounded");
  exact.dtype = at::kDouble;
  rounded.dtype = at::kBFloat16;
  const Decoder a = make(exact), b = make(rounded), c = make(options("plain"));
  for (size_t i = 0; i < a.parameters().size(); ++i) {
    EXPECT_TRUE(at::equal(a.parameters()[i].value.to(at::kFloat), c.parameters()[i].value));
    EXPECT_TRUE(at::equal(c.parameters()[i].value.to(at::kBFloat16), b.parameters()[i].value));
  }
  EXPECT_EQ(b.config().dtype, "bfloat16");
}

TEST_F(Init, RefusesAFolderInUse) {
  InitOptions used = options("used");
  init_model(used);
  EXPECT_NE(message_of<InputError>([&] { init_model(used); }).find("new or empty folder"), std::string::npos);
}

}  // namespace
}  // namespace espalier
