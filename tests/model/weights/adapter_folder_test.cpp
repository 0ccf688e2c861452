// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/weights/adapter_folder.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/safetensors.h"
#include "espalier/model/init.h"
#include "espalier/model/weights/tensor_bytes.h"
#include "tests/base/message_of.h"
#include "tests/base/scratch_folder.h"
#include "tests/config/tiny_config.h"

namespace espalier::testing {
namespace {

class AdapterFolderTest : public ::testing::Test {
 protected:
  AdapterFolderTest() : config_(parse(tiny_config("qwen3"))) {
    const ModelSpec& spec = config_;
    const std::vector<LinearMap> maps = adapted_maps(spec, lora_.targets);
    adapter_ = init_adapter(maps, lora_, 3, at::kFloat);
    for (const Parameter& parameter : adapter_.parameters) parameter.value.detach().normal_();
    adapter_.config = adapter_config(lora_, target_names(spec, maps), "some/model");
    save_adapter(spec, adapter_, folder_ / "adapter", at::kFloat);
  }

  SavedAdapter load(at::ScalarType dtype = at::kFloat) const {
    return load_adapter(folder_ / "adapter", config_, dtype);
  }

  // The message with a key of adapter_config.json changed.
  std::string refusal_of(const std::string& key, const nlohmann::ordered_json& value) const {
    nlohmann::ordered_json changed = adapter_.config;
    changed[key] = value;
    write_text(folder_ / "adapter" / kAdapterConfigFile, changed.dump());
    const std::string message = message_of<InputError>([&] { load(); });
    write_text(folder_ / "adapter" / kAdapterConfigFile, adapter_.config.dump());
    return message;
  }

  // The message with other tensors.
  std::string refusal_of(const std::function<void(std::vector<TensorView>*)>& change) const {
    std::vector<TensorView> tensors;
    for (const Parameter& parameter : adapter_.parameters)
      tensors.push_back(view_tensor("base_model.model." + parameter.name, parameter.value.detach()));
    change(&tensors);
    write_safetensors(folder_ / "adapter" / kAdapterWeightsFile, tensors);
    return message_of<InputError>([&] { load(); });
  }

  LoraOptions lora_{.rank = 2, .alpha = 3.5, .rslora = true, .targets = {"v_proj", "layers.1.mlp.up_proj"}};
  DecoderConfig config_;
  Adapter adapter_;
  ScratchFolder folder_;
};

TEST_F(AdapterFolderTest, KeepsEveryBit) {
  const SavedAdapter saved = load();
  EXPECT_EQ(saved.adapter.config, adapter_.config);
  EXPECT_EQ(saved.adapter.scale, adapter_.scale);
  EXPECT_EQ(saved.options.rank, 2);
  EXPECT_EQ(saved.options.targets,
            (std::vector<std::string>{"model.layers.0.self_attn.v_proj", "model.layers.1.self_attn.v_proj",
                                      "model.layers.1.mlp.up_proj"}));
  ASSERT_EQ(saved.adapter.parameters.size(), adapter_.parameters.size());
  for (size_t i = 0; i < adapter_.parameters.size(); ++i) {
    EXPECT_EQ(saved.adapter.parameters[i].name, adapter_.parameters[i].name);
    EXPECT_TRUE(saved.adapter.parameters[i].value.equal(adapter_.parameters[i].value));
    EXPECT_TRUE(saved.adapter.parameters[i].value.requires_grad());
  }
  // Beside a bfloat16 model it is float32 all the same.
  EXPECT_EQ(load(at::kBFloat16).adapter.parameters[0].value.scalar_type(), at::kFloat);
  EXPECT_EQ(load(at::kDouble).adapter.parameters[0].value.scalar_type(), at::kDouble);
}

TEST_F(AdapterFolderTest, RefusesWhatIsNoPlainAdapter) {
  const auto expect = [&](const std::string& key, const nlohmann::ordered_json& value, const char* words) {
    const std::string message = refusal_of(key, value);
    EXPECT_NE(message.find(kAdapterConfigFile), std::string::npos) << message;
    EXPECT_NE(message.find(words), std::string::npos) << message;
  };
  expect("peft_type", "LOHA", "peft_type: expected \"LORA\", received \"LOHA\"");
  expect("use_dora", true, "use_dora: expected none, received true");
  expect("bias", "lora_only", "bias: expected none");
  expect("modules_to_save", {"lm_head"}, "modules_to_save: expected none");
  expect("rank_pattern", {{"q_proj", 4}}, "rank_pattern: expected none");
  expect("target_parameters", {"down_proj"}, "target_parameters: expected none, received [\"down_proj\"]");
  expect("alpha_pattern", {{"q_proj", 4}}, "alpha_pattern: expected none");
  expect("init_lora_weights", "pissa", "init_lora_weights: expected true, false");
  expect("r", 0, "r: expected a whole number of at least 1, received 0");
  expect("r", "two", "r: expected a number");
  expect("lora_alpha", 0, "lora_alpha: expected a finite number above 0");
  expect("use_rslora", 1, "use_rslora: expected true or false");
  EXPECT_EQ(refusal_of("init_lora_weights", "gaussian"), "");
  EXPECT_EQ(refusal_of("lora_dropout", 0.1), "");  // which nothing but training minds
  SavedAdapter saved = load();
  check_no_dropout(saved.adapter, folder_ / "adapter");
  saved.adapter.config["lora_dropout"] = 0.1;
  EXPECT_NE(message_of<InputError>([&] {
              check_no_dropout(saved.adapter, folder_ / "adapter");
            }).find("lora_dropout: expected 0 for training, received 0.1"),
            std::string::npos);
}

TEST_F(AdapterFolderTest, RefusesAdaptersOfOtherModels) {
  using Tensors = std::vector<TensorView>;
  const auto expect = [&](const std::function<void(Tensors*)>& change, const char* words) {
    const std::string message = refusal_of(change);
    EXPECT_NE(message.find(kAdapterWeightsFile), std::string::npos) << message;
    EXPECT_NE(message.find(words), std::string::npos) << message;
  };
  const at::Tensor other = at::zeros({2, 17});
  expect([](Tensors* t) { t->pop_back(); },
         "tensor `base_model.model.model.layers.1.mlp.up_proj.lora_B.weight` is missing");
  expect([](Tensors* t) { t->clear(); }, "expected tensors of an adapter, received none");
  expect([](Tensors* t) { t->at(0).name = "base_model.model.model.layers.7.self_attn.v_proj.lora_A.weight"; },
         "is missing");
  expect(
      [](Tensors* t) {
        t->push_back(t->at(0));
        t->back().name = "base_model.model.model.layers.7.self_attn.v_proj.lora_A.weight";
      },
      "`base_model.model.model.layers.7.self_attn.v_proj.lora_A.weight`: the model has 2 layers, and no "
      "linear map of this "
      "name that can have an adapter; LoraConfig(target_modules=[\"q_proj\",");
  expect(
      [&](Tensors* t) {
        const std::string name = t->at(0).name;
        t->at(0) = view_tensor(name, other);
      },
      "expected shape [2, 16], received [2, 17]");
  at::Tensor infinite = at::zeros({2, 16});
  infinite[1][3] = std::numeric_limits<double>::infinity();
  expect(
      [&](Tensors* t) {
        const std::string name = t->at(0).name;
        t->at(0) = view_tensor(name, infinite);
      },
      "as float32 it holds 1 value of 32 that is not finite");
}

TEST_F(AdapterFolderTest, RefusesFoldersOfAnythingElse) {
  const auto message = [&](const char* name) {
    return message_of<InputError>([&] { load_adapter(folder_ / name, config_, at::kFloat); });
  };
  EXPECT_NE(message("nowhere").find("expected the folder of an adapter, there is none"), std::string::npos);
  std::filesystem::create_directories(folder_ / "empty");
  EXPECT_NE(message("empty").find("with adapter_config.json; there is none"), std::string::npos);
  std::filesystem::create_directories(folder_ / "pickle");
  write_text(folder_ / "pickle" / kAdapterConfigFile, adapter_.config.dump());
  write_text(folder_ / "pickle/adapter_model.bin", "");
  EXPECT_NE(message("pickle").find("adapter_model.bin, a pickle"), std::string::npos) << message("pickle");
}

TEST_F(AdapterFolderTest, MergesInFloat32AndRoundsOnce) {
  const LinearMap map = adapted_maps(config_, lora_.targets).front();
  const at::Tensor weight = at::randn({map.out, map.in}).to(at::kBFloat16), other = at::randn({3});
  const std::vector<Parameter> merged =
      merged_weights({{"model.norm.weight", other}, {map.name + ".weight", weight}}, adapter_);
  EXPECT_TRUE(merged[0].value.is_same(other));
  const at::Tensor &a = adapter_.parameters[0].value, &b = adapter_.parameters[1].value;
  const double scale = 3.5 / std::sqrt(2.0);
  const at::Tensor expected = weight.to(at::kFloat) + b.detach().matmul(a.detach()) * scale;
  EXPECT_TRUE(merged[1].value.equal(expected.to(at::kBFloat16)));
  EXPECT_FALSE(merged[1].value.equal(weight));
}

}  // namespace
}  // namespace espalier::testing
