// SPDX-License-Identifier: Apache-2.0
// Checkpoints that are written while the next steps go on are those of their step.
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <string>

#include "espalier/train/run/load_model.h"
#include "tests/train/run/trainer_fixture.h"

namespace espalier::testing {
namespace {

namespace fs = std::filesystem;

class BackgroundSaves : public TrainerTest {
 protected:
  TrainOptions run_of(const std::string& name, at::ScalarType dtype, bool in_background) {
    TrainOptions run = options(name, dtype);
    run.steps = 5;
    run.save_every = 1;
    run.save_in_background = in_background;
    return run;
  }
};

TEST_F(BackgroundSaves, WhatIsWrittenIsACopy) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const bool has_adapter : {false, true}) {
      SCOPED_TRACE(fmt::format("{}, {}", dtype_name(dtype), has_adapter));
      TrainOptions run = run_of(fmt::format("{}-{}", dtype_name(dtype), has_adapter), dtype, true);
      if (has_adapter) run.lora = LoraOptions{.rank = 2, .alpha = 2, .targets = {kAllLinear}};
      const Decoder decoder = load_model(run);
      const Optimizer optimizer(decoder, {});
      const CheckpointOptions checkpoint{SourceModel(run.model), at::kFloat};
      const RunState state{.step = 3, .data_hashes = {}, .settings = {}};
      const fs::path before = folder_ / fmt::format("before-{}-{}", dtype_name(dtype), has_adapter);
      CheckpointWriter waits(before, checkpoint);
      waits.start(decoder, optimizer, state);
      EXPECT_FALSE(waits.is_done());
      waits.finish();
      const fs::path folder = checkpoint_folder(run.out, 3);
      CheckpointWriter save(folder, checkpoint);
      save.start(decoder, optimizer, state, /*in_background=*/true);
      const at::NoGradGuard no_grad;
      for (const Parameter& entry : optimizer.state()) at::Tensor(entry.value).fill_(7);
      for (const Parameter& parameter : decoder.parameters()) at::Tensor(parameter.value).fill_(7);
      EXPECT_EQ(save.step(), 3);
      EXPECT_FALSE(fs::exists(folder));
      save.finish();
      expect_same_files(before, folder);
    }
  }
}

TEST_F(BackgroundSaves, EveryCheckpointIsThatOfARunThatWaits) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    const TrainOptions waits = run_of("waits-" + dtype_name(dtype), dtype, false);
    const TrainOptions run = run_of("run-" + dtype_name(dtype), dtype, true);
    ASSERT_TRUE(train(training_rows(), waits, {}));
    ASSERT_TRUE(train(training_rows(), run, {}));
    for (int64_t step = 1; step <= 5; ++step)
      expect_same_files(checkpoint_folder(waits.out, step), checkpoint_folder(run.out, step));
  }
}

TEST_F(BackgroundSaves, AnErrorIsSaidAndMadeUpFor) {
  TrainOptions run = run_of("run", at::kFloat, true);
  run.steps = 40;
  run.batch_size = 0;
  run.save_every = 20;
  std::string notes;
  TrainEvents events;
  events.step = [&](int64_t step, const nlohmann::ordered_json&) {
    if (step == 20) write_text(run.out / "checkpoints", "a file in its place");
  };
  events.note = [&](const std::string& text) {
    notes += text + "\n";
    if (text.find("could not be saved") != std::string::npos) fs::remove(run.out / "checkpoints");
  };
  ASSERT_TRUE(train(training_rows(), run, events));
  EXPECT_NE(notes.find("warning: step 20 could not be saved: "), std::string::npos) << notes;
  EXPECT_EQ(newest(run.out), "step_40");
}

TEST_F(BackgroundSaves, TheLastStepIsWaitedForAndItsErrorIsOne) {
  TrainOptions run = run_of("run", at::kFloat, true);
  TrainEvents events;
  events.step = [&](int64_t step, const nlohmann::ordered_json&) {
    if (step == 1) write_text(run.out / "checkpoints", "a file in its place");
  };
  EXPECT_THROW(train(training_rows(), run, events), RunError);
}

TEST(StateBytes, TheCopyIsPartOfThePlan) {
  TrainOptions options{.save_dtype = at::kFloat};
  const double own = optimizer_bytes(OptimizerKind::kAdamW, at::kFloat);
  EXPECT_EQ(state_bytes(options, at::kFloat, at::kCPU), own);
  options.save_in_background = true;
  EXPECT_EQ(state_bytes(options, at::kFloat, at::kCPU), own + 4 + own);
  EXPECT_EQ(state_bytes(options, at::kFloat, at::kCUDA), own);  // the copy is in host memory
  // Weights in the dtype of the folder, and exact ones where that is another.
  EXPECT_EQ(state_bytes(options, at::kBFloat16, at::kCPU), 12 + (4 + 2) + 12);
  class Three : public Group {
    int64_t size() const override { return 3; }
  } three;
  options.group = &three;  // a third of all of it
  EXPECT_DOUBLE_EQ(state_bytes(options, at::kFloat, at::kCPU), (own + 4 + own) / 3);
}

}  // namespace
}  // namespace espalier::testing
