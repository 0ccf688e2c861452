// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/weights/weights.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/safetensors.h"
#include "espalier/model/weights/tensor_bytes.h"
#include "tests/base/message_of.h"
#include "tests/base/scratch_folder.h"
#include "tests/model/tiny_models.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;
using testing::message_of;
using testing::ScratchFolder;
using testing::tiny_config;
using testing::tiny_decoder;
using Json = nlohmann::ordered_json;
using Tensors = std::vector<std::pair<std::string, at::Tensor>>;

constexpr const char* kIndex = "model.safetensors.index.json";
constexpr double kNan = std::numeric_limits<double>::quiet_NaN(),
                 kInfinity = std::numeric_limits<double>::infinity();

void write_file(const fs::path& path, const Tensors& tensors) {
  std::vector<TensorView> views;
  for (const auto& [name, tensor] : tensors) views.push_back(view_tensor(name, tensor));
  write_safetensors(path, views, {{"format", "pt"}, {"note", "kept"}});
}

Tensors tensors_of(const Decoder& decoder) {
  Tensors tensors;
  for (const Parameter& parameter : decoder.parameters()) {
    tensors.emplace_back(parameter.name, parameter.value.detach());
  }
  for (const Parameter& buffer : decoder.buffers()) tensors.emplace_back(buffer.name, buffer.value);
  return tensors;
}

std::string bytes_of(const TensorView& tensor) {
  return {reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size()};
}

std::vector<std::string> names_of(const SafetensorsFile& file) {
  std::vector<std::string> names;
  for (const TensorView& tensor : file.tensors()) names.push_back(tensor.name);
  return names;
}

/// A source folder with a model, in one file or in two shards, an unknown tensor and files beside it.
class Weights : public ::testing::Test {
 protected:
  void make_source(const Json& config, at::ScalarType dtype, bool sharded) {
    source_ = folder_ / "source";
    fs::remove_all(source_);
    fs::create_directories(source_);
    std::ofstream(source_ / "config.json") << config.dump();
    Tensors tensors = tensors_of(tiny_decoder(config, dtype, 11));
    std::reverse(tensors.begin(), tensors.end());  // another order
    tensors.insert(tensors.begin() + 3, {"unknown.extra", at::randn({5}, at::kHalf)});
    for (const char* name : {"tokenizer.json", "chat_template.jinja", "LICENSE", "generation_config.json"}) {
      std::ofstream(source_ / name) << "text of " << name;
    }
    for (const char* name : {"optimizer.pt", "pytorch_model.bin", "leftover.safetensors", ".hidden"}) {
      std::ofstream(source_ / name) << "not to be copied";
    }
    if (!sharded) return write_file(source_ / "model.safetensors", tensors);
    const Tensors first(tensors.begin(), tensors.begin() + 7), second(tensors.begin() + 7, tensors.end());
    write_file(source_ / kFirst, first);
    write_file(source_ / kSecond, second);
    index_ = {{"metadata", {{"total_parameters", 1}, {"total_size", 2}}}, {"weight_map", Json::object()}};
    for (const auto& [name, tensor] : first) index_["weight_map"][name] = kFirst;
    for (const auto& [name, tensor] : second) index_["weight_map"][name] = kSecond;
    write_index();
  }
  void write_index() { std::ofstream(source_ / kIndex) << index_.dump(); }
  std::string load_error() {
    return message_of<InputError>([&] { load_decoder(source_, at::kFloat); });
  }

  static constexpr const char* kFirst = "model-00001-of-00002.safetensors";
  static constexpr const char* kSecond = "model-00002-of-00002.safetensors";
  ScratchFolder folder_;
  fs::path source_;
  Json index_;
};

TEST(Dtype, NamesGoBothWays) {
  for (const std::string name : {"float64", "float32", "bfloat16"})
    EXPECT_EQ(dtype_name(parse_dtype(name)), name);
  EXPECT_NE(message_of<InputError>([] { parse_dtype("half"); }).find("bfloat16, received `half`"),
            std::string::npos);
  EXPECT_THROW(dtype_name(at::kHalf), InputError);
}

TEST_F(Weights, SavingWhatWasLoadedChangesNoByte) {
  for (const bool sharded : {false, true}) {
    for (const std::string type : {"llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe", "gpt_oss"}) {
      make_source(tiny_config(type), at::kFloat, sharded);
      const Decoder decoder = load_decoder(source_, at::kFloat);
      const fs::path out = folder_ / (type + (sharded ? "2" : "1"));
      SourceModel(source_).save(decoder, out, at::kFloat);
      const std::vector<std::string> files =
          sharded ? std::vector<std::string>{kFirst, kSecond} : std::vector<std::string>{"model.safetensors"};
      for (const std::string& file : files) EXPECT_EQ(read_text(source_ / file), read_text(out / file));
      EXPECT_EQ(Json::parse(read_text(source_ / "config.json")), Json::parse(read_text(out / "config.json")));
      EXPECT_EQ(fs::exists(out / kIndex), sharded);
    }
  }
}

/// The tensors of a decoder with all experts of a layer in one, as Transformers 5 has them in memory.
Tensors with_fused_experts(const Decoder& decoder) {
  Tensors fused;
  for (const auto& [name, tensor] : tensors_of(decoder)) {
    const auto experts = name.find(".mlp.experts.");
    if (experts == std::string::npos) {
      fused.emplace_back(name, tensor);
      continue;
    }
    const std::string stem = name.substr(0, experts) + ".mlp.experts.";
    if (!name.ends_with(".0.down_proj.weight")) continue;
    std::vector<at::Tensor> gate_up, down;
    for (int i = 0; i < decoder.config().moe()->num_experts; ++i) {
      const auto part = [&](const char* kind) {
        for (const Parameter& parameter : decoder.parameters()) {
          if (parameter.name == fmt::format("{}{}.{}.weight", stem, i, kind)) return parameter.value.detach();
        }
        throw std::out_of_range(kind);
      };
      gate_up.push_back(at::cat({part("gate_proj"), part("up_proj")}));
      down.push_back(part("down_proj"));
    }
    fused.emplace_back(stem + "gate_up_proj", at::stack(gate_up));
    fused.emplace_back(stem + "down_proj", at::stack(down));
  }
  return fused;
}

TEST_F(Weights, ExpertsMayBeOneTensorOfALayer) {
  for (const std::string type : {"qwen3_moe", "glm4_moe"}) {
    make_source(tiny_config(type), at::kFloat, false);
    const Decoder expected = load_decoder(source_, at::kFloat);
    Tensors fused = with_fused_experts(expected);
    const fs::path file = source_ / "model.safetensors";
    write_file(file, fused);
    const Decoder decoder = load_decoder(source_, at::kFloat);
    for (size_t i = 0; i < expected.parameters().size(); ++i) {
      EXPECT_TRUE(at::equal(decoder.parameters()[i].value, expected.parameters()[i].value))
          << decoder.parameters()[i].name;
    }
    EXPECT_TRUE(carried_tensors(source_).empty());
    SourceModel(source_).save(decoder, folder_ / type, at::kFloat);
    EXPECT_EQ(read_text(folder_ / type / "model.safetensors"), read_text(file));
    // Experts in both forms, or too many of them, are not passed over.
    Tensors both = fused;
    for (const auto& entry : tensors_of(expected)) {
      if (entry.first.ends_with(".experts.0.up_proj.weight")) both.push_back(entry);
    }
    write_file(file, both);
    EXPECT_NE(load_error().find("experts.0.up_proj.weight`: expected once"), std::string::npos)
        << load_error();
    for (auto& [name, tensor] : fused) {
      if (name.ends_with(".experts.down_proj")) tensor = at::cat({tensor, tensor});
    }
    write_file(file, fused);
    const std::string error = load_error();
    EXPECT_NE(error.find("experts.down_proj`: expected"), std::string::npos) << error;
  }
}

TEST_F(Weights, ExpertsInMxfp4AreRefusedByName) {
  const Json config = tiny_config("gpt_oss");
  make_source(config, at::kFloat, false);
  Tensors quantised;
  for (const auto& [name, tensor] : tensors_of(tiny_decoder(config, at::kFloat, 11))) {
    const bool is_packed = name.ends_with(".experts.gate_up_proj") || name.ends_with(".experts.down_proj");
    quantised.emplace_back(is_packed ? name + "_blocks" : name, tensor);
    if (is_packed) quantised.emplace_back(name + "_scales", tensor);
  }
  write_file(source_ / "model.safetensors", quantised);
  const std::string error = load_error();
  EXPECT_NE(error.find("model.safetensors: tensor `model.layers.0.mlp.experts.gate_up_proj_blocks`: expected "
                       "`model.layers.0.mlp.experts.gate_up_proj` in a floating dtype, received MXFP4"),
            std::string::npos)
      << error;
  EXPECT_NE(error.find("dequantize=True"), std::string::npos) << error;
}

TEST_F(Weights, SavesInAnotherDtype) {
  make_source(tiny_config("llama"), at::kFloat, true);
  const Decoder decoder = load_decoder(source_, at::kDouble);
  const fs::path out = folder_ / "out";
  SourceModel(source_).save(decoder, out, at::kBFloat16);

  int64_t total_bytes = 0;
  for (const char* name : {kFirst, kSecond}) {
    const SafetensorsFile before(source_ / name), after(out / name);
    EXPECT_EQ(names_of(before), names_of(after));
    EXPECT_EQ(before.metadata(), after.metadata());
    for (const TensorView& tensor : after.tensors()) {
      total_bytes += static_cast<int64_t>(tensor.bytes.size());
      EXPECT_EQ(tensor.dtype, tensor.name == "unknown.extra" ? "F16" : "BF16");
      EXPECT_EQ(tensor.shape, before.at(tensor.name).shape);
    }
  }
  EXPECT_EQ(bytes_of(SafetensorsFile(source_ / kFirst).at("unknown.extra")),
            bytes_of(SafetensorsFile(out / kFirst).at("unknown.extra")));
  const Json index = Json::parse(read_text(out / kIndex));
  EXPECT_EQ(index["metadata"]["total_size"], total_bytes);
  EXPECT_EQ(index["metadata"]["total_parameters"], 1);
  EXPECT_EQ(index["weight_map"], index_["weight_map"]);
  EXPECT_EQ(read_config(out).dtype, "bfloat16");

  const Decoder again = load_decoder(out, at::kDouble);
  for (size_t i = 0; i < decoder.parameters().size(); ++i) {
    const at::Tensor expected = decoder.parameters()[i].value.to(at::kBFloat16).to(at::kDouble);
    EXPECT_TRUE(at::equal(again.parameters()[i].value, expected));
    EXPECT_TRUE(again.parameters()[i].value.requires_grad() && again.parameters()[i].value.is_leaf());
  }
}

TEST_F(Weights, SavesChangedParameters) {
  make_source(tiny_config("qwen3"), at::kFloat, true);
  const Decoder decoder = load_decoder(source_, at::kFloat);
  {
    at::NoGradGuard no_grad;
    for (const Parameter& parameter : decoder.parameters()) at::Tensor(parameter.value).mul_(2);
  }
  SourceModel(source_).save(decoder, folder_ / "out", at::kFloat);
  const Decoder before = load_decoder(source_, at::kFloat), after = load_decoder(folder_ / "out", at::kFloat);
  for (size_t i = 0; i < before.parameters().size(); ++i) {
    EXPECT_TRUE(at::equal(after.parameters()[i].value, before.parameters()[i].value * 2));
  }
}

TEST_F(Weights, ReadsEveryFloatingDtype) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) {
    make_source(tiny_config("llama"), dtype, false);
    const Decoder expected = tiny_decoder(tiny_config("llama"), dtype, 11);
    const Decoder loaded = load_decoder(source_, at::kFloat);
    for (size_t i = 0; i < expected.parameters().size(); ++i) {
      EXPECT_TRUE(at::equal(loaded.parameters()[i].value, expected.parameters()[i].value.to(at::kFloat)));
    }
  }
}

TEST_F(Weights, CopiesWhatBelongsToTheModel) {
  make_source(tiny_config("llama"), at::kFloat, false);
  fs::create_directories(source_ / "subfolder");
  SourceModel(source_).save(load_decoder(source_, at::kFloat), folder_ / "out", at::kFloat);
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder_ / "out")) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names,
            (std::vector<std::string>{"LICENSE", "chat_template.jinja", "config.json",
                                      "generation_config.json", "model.safetensors", "tokenizer.json"}));
  EXPECT_EQ(read_text(folder_ / "out/LICENSE"), "text of LICENSE");
}

TEST_F(Weights, TiedModelsMayHoldTheirHead) {
  const Json config = tiny_config("llama", {{"tie_word_embeddings", true}});
  make_source(config, at::kFloat, false);
  Tensors tensors = tensors_of(tiny_decoder(config, at::kFloat, 11));
  const at::Tensor embedding = tensors.front().second;
  ASSERT_EQ(tensors.front().first, "model.embed_tokens.weight");
  tensors.emplace_back("lm_head.weight", embedding.to(at::kDouble));
  write_file(source_ / "model.safetensors", tensors);

  const Decoder decoder = load_decoder(source_, at::kFloat);
  EXPECT_EQ(carried_tensors(source_), std::vector<std::string>{});
  EXPECT_EQ(decoder.parameters().size(), tensors.size() - 1);
  {
    const at::NoGradGuard no_grad;
    at::Tensor(decoder.parameters().front().value).mul_(2);
  }
  SourceModel(source_).save(decoder, folder_ / "out", at::kFloat);
  const SafetensorsFile out(folder_ / "out/model.safetensors");
  EXPECT_EQ(out.tensors().back().name, "lm_head.weight");
  EXPECT_EQ(bytes_of(out.at("lm_head.weight")), bytes_of(out.at("model.embed_tokens.weight")));
}

TEST_F(Weights, TiedModelsMayNotHoldAnotherHead) {
  const Json config = tiny_config("llama", {{"tie_word_embeddings", true}});
  make_source(config, at::kFloat, false);
  const Tensors tensors = tensors_of(tiny_decoder(config, at::kFloat, 11));
  const auto error_with = [&](const at::Tensor& head) {
    Tensors with_head = tensors;
    with_head.emplace_back("lm_head.weight", head);
    write_file(source_ / "model.safetensors", with_head);
    return load_error();
  };
  EXPECT_EQ(error_with(tensors.front().second), "");
  at::Tensor other = tensors.front().second.clone();
  other[3][4] += 1e-6;
  for (const at::Tensor& head : {other, other.to(at::kDouble), at::zeros({37, 15}), at::zeros({37, 16})}) {
    EXPECT_EQ(
        error_with(head),
        fmt::format("{}: tensor `lm_head.weight`: config.json says that tie_word_embeddings is true, but its "
                    "values are not those of `model.embed_tokens.weight` (correct config.json, or remove the "
                    "tensor)",
                    (source_ / "model.safetensors").string()));
  }
}

TEST_F(Weights, TensorsOfOthersAreCarriedByName) {
  make_source(tiny_config("llama"), at::kFloat, false);
  Tensors tensors = tensors_of(tiny_decoder(tiny_config("llama"), at::kFloat, 11));
  const std::vector<std::string> extra = {"model.layers.0.self_attn.rotary_emb.inv_freq",
                                          "model.layers.1.self_attn.k_scale",
                                          "model.mtp.0.weight",
                                          "model.rotary_emb.inv_freq",
                                          "score.weight",
                                          "v_head.bias",
                                          "vision_tower.layers.9.mlp.bias"};
  for (const std::string& name : extra) tensors.insert(tensors.begin() + 1, {name, at::randn({3})});
  write_file(source_ / "model.safetensors", tensors);
  SourceModel(source_).save(load_decoder(source_, at::kFloat), folder_ / "out", at::kFloat);
  EXPECT_EQ(carried_tensors(source_), extra);
  EXPECT_EQ(read_text(folder_ / "out/model.safetensors"), read_text(source_ / "model.safetensors"));
}

// What looks like a part of the model that config.json does not have is never passed over.
TEST_F(Weights, TensorsThatLookLikeTheModelsOwnAreRefused) {
  struct Case {
    std::string type, tensor, reason;
  };
  const std::vector<Case> cases = {
      {"llama", "model.layers.2.mlp.up_proj.weight", "num_hidden_layers is 2"},
      {"llama", "model.layers.99999999999999999999.mlp.up_proj.weight", "no such parameter"},
      {"llama", "model.layers.-1.mlp.up_proj.weight", "num_hidden_layers is 2"},
      {"llama", "model.layers.1.self_attn.q_proj.bias", "attention_bias is false"},
      {"llama", "model.layers.0.mlp.down_proj.bias", "mlp_bias is false"},
      {"llama", "model.layers.0.self_attn.q_norm.weight",
       "the model is a llama, which has no norms of queries"},
      {"llama", "model.layers.0.input_layernorm.bias", "a llama model has no such parameter"},
      {"qwen2", "model.layers.0.self_attn.o_proj.bias", "a qwen2 model has no bias there"},
      {"qwen3", "model.layers.0.self_attn.q_proj.bias", "attention_bias is false"},
      {"qwen3", "model.layers.0.mlp.down_proj.bias", "a qwen3 model has no bias there"},
      {"ernie4_5", "model.layers.0.mlp.down_proj.bias", "config.json says that use_bias is false"},
      {"ernie4_5", "model.layers.0.self_attn.o_proj.bias", "config.json says that use_bias is false"},
      {"seed_oss", "model.layers.0.self_attn.o_proj.bias",
       "config.json says that attention_out_bias is false"},
      {"mistral", "model.layers.0.self_attn.q_proj.bias", "a mistral model has no bias there"},
      {"llama", "model.layers.0.self_attn.q_proj.weight_scale_inv", "no such parameter"},
      {"llama", "model.layers.0.self_attn.q_proj.lora_A.weight", "an adapter"},
      {"llama", "base_model.model.lora_B.weight", "an adapter"},
      {"llama", "lm_head.bias", "no such parameter"},
      {"llama", "model.norm.bias", "no such parameter"},
      {"llama", "model.embed_tokens.scale", "no such parameter"},
  };
  for (const Case& each : cases) {
    for (const bool sharded : {false, true}) {
      const Json more = each.type == "seed_oss" ? Json{{"residual_dropout", 0.0}} : Json::object();
      make_source(tiny_config(each.type, more), at::kFloat, sharded);
      const fs::path file = source_ / (sharded ? kSecond : "model.safetensors");
      const std::vector<float> values(3);
      {
        const SafetensorsFile stored(file);
        std::vector<TensorView> views = stored.tensors();
        views.push_back({each.tensor, "F32", {3}, std::as_bytes(std::span(values))});
        write_safetensors(file, views);
      }
      if (sharded) {
        index_["weight_map"][each.tensor] = kSecond;
        write_index();
      }
      const std::string message = load_error();
      EXPECT_TRUE(message.starts_with(fmt::format("{}: tensor `{}`: ", file.string(), each.tensor)))
          << message;
      EXPECT_NE(message.find(each.reason), std::string::npos) << message;
      EXPECT_EQ(message_of<InputError>([&] { carried_tensors(source_); }), message);
    }
  }
}

// Nobody writes to these pipes: opening one would wait for ever.
TEST_F(Weights, PipesAreRefusedAtOnce) {
  for (const std::string name : {"model.safetensors", "config.json"}) {
    make_source(tiny_config("llama"), at::kFloat, false);
    fs::remove(source_ / name);
    ASSERT_EQ(::mkfifo((source_ / name).c_str(), 0600), 0);
    EXPECT_NE(load_error().find("expected a regular file, received a pipe or device"), std::string::npos)
        << load_error();
  }
  make_source(tiny_config("llama"), at::kFloat, true);
  fs::remove(source_ / kIndex);
  ASSERT_EQ(::mkfifo((source_ / kIndex).c_str(), 0600), 0);
  EXPECT_NE(load_error().find("expected a regular file"), std::string::npos);
}

TEST_F(Weights, FaultsNameFileAndTensor) {
  const Json config = tiny_config("llama");
  const auto refusal = [&](const auto& change) {
    make_source(config, at::kFloat, false);
    Tensors tensors = tensors_of(tiny_decoder(config, at::kFloat, 11));
    change(tensors);
    write_file(source_ / "model.safetensors", tensors);
    return load_error();
  };
  const auto expect_named = [&](const std::string& message, const std::string& what) {
    EXPECT_NE(message.find((source_ / "model.safetensors").string()), std::string::npos) << message;
    EXPECT_NE(message.find("model.layers.0.self_attn.q_proj.weight"), std::string::npos) << message;
    EXPECT_NE(message.find(what), std::string::npos) << message;
  };
  EXPECT_EQ(refusal([](Tensors&) {}), "");
  expect_named(refusal([](Tensors& tensors) { tensors.erase(tensors.begin() + 1); }), "missing");
  expect_named(refusal([](Tensors& tensors) { tensors[1].second = at::zeros({24, 15}); }),
               "expected shape [24, 16], received [24, 15]");

  make_source(config, at::kFloat, false);
  const std::vector<int32_t> integers(24 * 16);
  Tensors tensors = tensors_of(tiny_decoder(config, at::kFloat, 11));
  std::vector<TensorView> views;
  for (const auto& [name, tensor] : tensors) views.push_back(view_tensor(name, tensor));
  views[1].dtype = "I32";
  views[1].bytes = std::as_bytes(std::span(integers));
  write_safetensors(source_ / "model.safetensors", views);
  expect_named(load_error(), "received I32");

  fs::remove(source_ / "model.safetensors");
  EXPECT_NE(load_error().find(kIndex), std::string::npos);
}

TEST_F(Weights, FaultyIndexIsRefused) {
  const auto refusal = [&](const auto& change) {
    make_source(tiny_config("llama"), at::kFloat, true);
    change();
    write_index();
    return load_error();
  };
  const std::string name = "model.norm.weight";
  EXPECT_EQ(refusal([] {}), "");
  for (const std::string file : {"../outside.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..",
                                 "x\\y.safetensors", ".x.safetensors", "model.bin", ""}) {
    const std::string message = refusal([&] { index_["weight_map"][name] = file; });
    EXPECT_NE(message.find("plain .safetensors name"), std::string::npos) << file << ": " << message;
    EXPECT_NE(message.find(name), std::string::npos) << message;
  }
  EXPECT_NE(refusal([&] { index_["weight_map"][name] = "absent.safetensors"; }).find("absent.safetensors"),
            std::string::npos);
  EXPECT_NE(refusal([&] { index_["weight_map"][name] = 3; }).find("expected a file name"), std::string::npos);
  EXPECT_NE(refusal([&] { index_["weight_map"]["no.such"] = kFirst; }).find("no.such"), std::string::npos);
  EXPECT_NE(refusal([&] { index_["weight_map"].erase(name); }).find("no file"), std::string::npos);
  EXPECT_NE(refusal([&] { index_.erase("weight_map"); }).find("weight_map"), std::string::npos);
  EXPECT_NE(refusal([&] { index_ = Json::array(); }).find("weight_map"), std::string::npos);
  // The same tensor in two shards.
  EXPECT_NE(refusal([&] {
              const SafetensorsFile first(source_ / kFirst), second(source_ / kSecond);
              std::vector<TensorView> tensors = second.tensors();
              tensors.push_back(first.tensors().front());
              write_safetensors(source_ / kSecond, tensors);
            }).find("by the weight_map"),
            std::string::npos);
}

TEST_F(Weights, LinksMayNotLeaveTheFolder) {
  make_source(tiny_config("llama"), at::kFloat, false);
  std::ofstream(folder_ / "secret.txt") << "secret";
  fs::create_symlink(source_ / "LICENSE", source_ / "COPYING");
  EXPECT_EQ(load_error(), "");
  fs::create_symlink(folder_ / "secret.txt", source_ / "vocab.txt");
  EXPECT_NE(load_error().find("vocab.txt: expected a file of this folder"), std::string::npos);
  fs::remove(source_ / "vocab.txt");

  fs::rename(source_ / "model.safetensors", folder_ / "elsewhere.safetensors");
  fs::create_symlink(folder_ / "elsewhere.safetensors", source_ / "model.safetensors");
  EXPECT_NE(load_error().find("model.safetensors: expected a file of this folder"), std::string::npos);
}

TEST_F(Weights, ReadsASnapshotOfTheHuggingFaceCache) {
  make_source(tiny_config("llama"), at::kFloat, false);
  const fs::path blobs = folder_ / "models--x/blobs", snapshot = folder_ / "models--x/snapshots/abc";
  fs::create_directories(blobs);
  fs::create_directories(snapshot);
  for (const char* name : {"model.safetensors", "config.json", "tokenizer.json"}) {
    fs::copy_file(source_ / name, blobs / name);
    fs::create_symlink(fs::path("../../blobs") / name, snapshot / name);
  }
  const Decoder decoder = load_decoder(snapshot, at::kFloat);
  SourceModel(snapshot).save(decoder, folder_ / "out", at::kFloat);
  EXPECT_FALSE(fs::is_symlink(folder_ / "out/tokenizer.json"));
  EXPECT_EQ(read_text(folder_ / "out/tokenizer.json"), "text of tokenizer.json");
  EXPECT_EQ(read_text(folder_ / "out/model.safetensors"), read_text(source_ / "model.safetensors"));
}

TEST_F(Weights, NeverWritesOverItsSource) {
  make_source(tiny_config("llama"), at::kFloat, false);
  const Decoder decoder = load_decoder(source_, at::kFloat);
  const std::string before = read_text(source_ / "model.safetensors");
  fs::create_directory_symlink(source_, folder_ / "alias");
  for (const fs::path& out : {source_, folder_ / "alias", source_ / "../source"}) {
    EXPECT_THROW(SourceModel(source_).save(decoder, out, at::kFloat), InputError);
  }
  EXPECT_EQ(read_text(source_ / "model.safetensors"), before);
}

TEST_F(Weights, ASourceMayVanishAfterItWasRead) {
  for (const bool sharded : {false, true}) {
    make_source(tiny_config("llama"), at::kFloat, sharded);
    const fs::path whole = folder_ / fmt::format("whole-{}", sharded),
                   orphan = folder_ / fmt::format("orphan-{}", sharded);
    const SourceModel source(source_);
    const Decoder decoder = load_decoder(source_, at::kFloat);
    EXPECT_EQ(source.config(), Json::parse(read_text(source_ / "config.json")));
    source.save(decoder, whole, at::kFloat);
    // Spoilt in place, then removed.
    for (const auto& entry : fs::directory_iterator(source_)) fs::resize_file(entry.path(), 1);
    fs::remove_all(source_);
    source.save(decoder, orphan, at::kFloat);
    int64_t files = 0;
    for (const auto& entry : fs::directory_iterator(whole)) {
      ++files;
      EXPECT_EQ(read_text(entry.path()), read_text(orphan / entry.path().filename())) << entry.path();
    }
    EXPECT_EQ(files, std::distance(fs::directory_iterator(orphan), {}));
    EXPECT_GE(files, 6);
  }
}

TEST_F(Weights, NumbersThatAreNotFiniteAreNeverSaved) {
  make_source(tiny_config("llama"), at::kDouble, false);
  const Decoder decoder = load_decoder(source_, at::kDouble);
  const at::Tensor norm = decoder.parameters().back().value.detach().view({-1});
  const std::string& name = decoder.parameters().back().name;
  const double before = norm[1].item<double>();
  for (const double value : {kNan, kInfinity, -kInfinity, 1e300}) {  // the last one is infinite in float32
    norm[1] = value;
    const std::string message =
        message_of<NonFiniteError>([&] { SourceModel(source_).save(decoder, folder_ / "out", at::kFloat); });
    EXPECT_NE(message.find(fmt::format("`{}` holds 1 value of", name)), std::string::npos) << message;
    EXPECT_FALSE(fs::exists(folder_ / "out/model.safetensors"));
  }
  norm[1] = before;
  EXPECT_NO_THROW(SourceModel(source_).save(decoder, folder_ / "out", at::kFloat));
}

TEST(AllFinite, SeesEveryPlaceOfEveryDtype) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    for (const int64_t size : {1, 2, 7, 33, 1000}) {
      const at::Tensor values = at::randn({size}, at::kDouble).to(dtype);
      EXPECT_TRUE(all_finite(values));
      EXPECT_EQ(nonfinite_text(values), "");
      for (const int64_t place : {int64_t{0}, size / 2, size - 1}) {
        for (const double value : {kNan, kInfinity, -kInfinity}) {
          const at::Tensor spoilt = values.clone();
          spoilt[place] = value;
          EXPECT_FALSE(all_finite(spoilt)) << size << ", " << place;
          EXPECT_EQ(nonfinite_text(spoilt),
                    fmt::format("holds 1 value of {} that is not finite ({} at {})", size, value, place));
        }
      }
    }
  }
  EXPECT_TRUE(all_finite(at::empty({0})));
  EXPECT_TRUE(all_finite(at::full({3}, 3e38, at::kFloat)));
}

}  // namespace
}  // namespace espalier
