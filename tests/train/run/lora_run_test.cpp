// SPDX-License-Identifier: Apache-2.0
// Runs that train an adapter: their checkpoints, how they go on, and what they refuse.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/safetensors.h"
#include "espalier/model/init.h"
#include "espalier/model/weights/adapter_folder.h"
#include "espalier/train/run/load_model.h"
#include "tests/base/message_of.h"
#include "tests/train/run/trainer_fixture.h"

namespace espalier::testing {
namespace {

namespace fs = std::filesystem;

class LoraRunTest : public TrainerTest {
 protected:
  TrainOptions lora_options(const std::string& run, at::ScalarType dtype = at::kDouble) {
    TrainOptions run_options = options(run, dtype);
    run_options.save_dtype = dtype == at::kDouble ? dtype : at::kFloat;
    run_options.lora = LoraOptions{.rank = 3, .alpha = 6, .targets = {"q_proj", "down_proj"}};
    return run_options;
  }

  static fs::path last_step(const TrainOptions& run) { return checkpoints(run.out).front(); }

  static std::string refusal(const TrainOptions& run) {
    return message_of<InputError>([&] { train(training_rows(), run, {}); });
  }
};

TEST_F(LoraRunTest, ResumingContinuesBitForBit) {
  struct Case {
    at::ScalarType dtype, save_dtype;
    OptimizerKind optimizer;
  };
  const Case cases[] = {{at::kFloat, at::kFloat, OptimizerKind::kAdamW},
                        {at::kDouble, at::kFloat, OptimizerKind::kSgd},
                        {at::kBFloat16, at::kFloat, OptimizerKind::kAdamW},
                        {at::kBFloat16, at::kBFloat16, OptimizerKind::kAdamW}};
  int number = 0;
  for (const Case& c : cases) {
    SCOPED_TRACE(fmt::format("{} saved as {}", dtype_name(c.dtype), dtype_name(c.save_dtype)));
    TrainOptions run = lora_options(fmt::format("whole-{}", number), c.dtype);
    run.save_dtype = c.save_dtype;
    run.optimizer.kind = c.optimizer;
    run.optimizer.weight_decay = 0.1;
    run.steps = 4;
    ASSERT_TRUE(train(training_rows(), run, {}));
    const fs::path whole = run.out;
    run.out = folder_ / fmt::format("halves-{}", number++);
    run.steps = 2;
    ASSERT_TRUE(train(training_rows(), run, {}));
    run.steps = 4;
    run.resume = true;
    ASSERT_TRUE(train(training_rows(), run, {}));
    EXPECT_EQ(losses(whole), losses(run.out));
    EXPECT_EQ(losses(whole).size(), 4u);
    expect_same_files(whole / "checkpoints/step_4", run.out / "checkpoints/step_4");
  }
}

// Checkpoints hold the adapter alone, under PEFT's names, and the optimiser's state of nothing else.
TEST_F(LoraRunTest, CheckpointsAreFoldersOfPeft) {
  TrainOptions run = lora_options("run", at::kBFloat16);
  run.steps = 1;
  ASSERT_TRUE(train(training_rows(), run, {}));
  const fs::path step = last_step(run);
  EXPECT_FALSE(fs::exists(step / "model.safetensors") || fs::exists(step / "config.json"));
  const SafetensorsFile weights(step / kAdapterWeightsFile);
  EXPECT_EQ(weights.tensors().size(), 8u);  // two maps in two layers
  const TensorView& a = weights.at("base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight");
  EXPECT_EQ(a.dtype, "F32");
  EXPECT_EQ(a.shape, (std::vector<int64_t>{3, 16}));
  EXPECT_EQ(SafetensorsFile(step / "optimizer.safetensors").tensors().size(), 1 + 2 * 8u);
  const auto config = nlohmann::json::parse(read_text(step / kAdapterConfigFile));
  EXPECT_EQ(config["peft_type"], "LORA");
  EXPECT_EQ(config["r"], 3);
  EXPECT_EQ(config["lora_alpha"], 6);
  EXPECT_EQ(config["target_modules"], (std::vector<std::string>{"q_proj", "down_proj"}));
  EXPECT_EQ(config["base_model_name_or_path"], run.model.string());
}

TEST_F(LoraRunTest, GoesOnFromAnAdapterOfAFolder) {
  TrainOptions first = lora_options("first");
  first.steps = 2;
  first.optimizer.kind = OptimizerKind::kSgd;  // without state, two runs are one
  ASSERT_TRUE(train(training_rows(), first, {}));
  TrainOptions whole = first;
  whole.out = folder_ / "whole";
  whole.steps = 3;
  ASSERT_TRUE(train(training_rows(), whole, {}));

  TrainOptions second = first;
  second.lora.reset();
  second.adapter = last_step(first);
  second.out = folder_ / "second";
  second.steps = 1;
  const Decoder begun = load_model(second);
  const SavedAdapter saved = load_adapter(second.adapter, begun.config(), at::kDouble);
  for (size_t i = 0; i < saved.adapter.parameters.size(); ++i) {
    EXPECT_EQ(begun.parameters()[i].name, saved.adapter.parameters[i].name);
    EXPECT_TRUE(begun.parameters()[i].value.equal(saved.adapter.parameters[i].value));
  }
  EXPECT_EQ(begun.adapter().scale, 2);
  ASSERT_TRUE(train(training_rows(), second, {}));
  // Its checkpoints keep the config of the adapter.
  EXPECT_EQ(read_text(last_step(second) / kAdapterConfigFile),
            read_text(second.adapter / kAdapterConfigFile));
  second.resume = true;
  second.steps = 2;
  ASSERT_TRUE(train(training_rows(), second, {}));
  second.adapter = last_step(whole);
  second.steps = 3;
  EXPECT_NE(refusal(second).find("began with other files in --adapter"), std::string::npos)
      << refusal(second);
}

TEST_F(LoraRunTest, RefusesToGoOnAsAnotherRun) {
  TrainOptions run = lora_options("run");
  run.steps = 1;
  ASSERT_TRUE(train(training_rows(), run, {}));
  run.resume = true;
  run.steps = 2;
  TrainOptions other = run;
  other.lora->alpha = 7;
  EXPECT_NE(refusal(other).find("lora-alpha was 6"), std::string::npos) << refusal(other);
  other = run;
  other.lora->targets = {"q_proj"};
  EXPECT_NE(refusal(other).find("lora-targets was \"q_proj,down_proj\""), std::string::npos)
      << refusal(other);
  other = run;
  other.lora.reset();
  EXPECT_NE(refusal(other).find("lora-rank was 3"), std::string::npos) << refusal(other);
  // Checkpoints do not hold the model, so another one would go unnoticed but for its hash.
  other = run;
  other.model = folder_ / "other";
  write_tiny_model(other.model, Family::kQwen3, kVocabSize, 78, at::kDouble);
  EXPECT_NE(refusal(other).find("began with other files in --model"), std::string::npos) << refusal(other);
  EXPECT_EQ(refusal(run), "");
}

TEST_F(LoraRunTest, RefusesTwoAdaptersAndBadOptions) {
  TrainOptions run = lora_options("run");
  run.adapter = folder_ / "adapter";
  EXPECT_NE(refusal(run).find("expected no --lora-rank beside it"), std::string::npos) << refusal(run);
  run.adapter.clear();
  run.lora->rank = 0;
  EXPECT_NE(refusal(run).find("lora-rank: expected a whole number of at least 1"), std::string::npos);
  run.lora->rank = 1;
  run.lora->targets = {"query"};
  EXPECT_NE(refusal(run).find("no linear map `query`"), std::string::npos);
}

}  // namespace
}  // namespace espalier::testing
