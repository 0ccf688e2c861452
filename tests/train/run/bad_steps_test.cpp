// SPDX-License-Identifier: Apache-2.0
// Steps whose numbers are not finite: what is said of them, and what --skip-bad-steps leaves out.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>

#include "espalier/base/check.h"
#include "espalier/data/builder.h"
#include "espalier/train/optimizer/diagnosis.h"
#include "tests/base/message_of.h"
#include "tests/engine/tiny_models.h"
#include "tests/train/run/trainer_fixture.h"

namespace espalier::testing {
namespace {

namespace fs = std::filesystem;

class BadSteps : public TrainerTest {
 protected:
  // Two steps of two rows an epoch. With `is_bad`, a token of row 2 has a policy ratio that overflows.
  static Trajectories rows(int64_t number, bool is_bad) {
    TrajectoriesBuilder builder;
    for (int32_t i = 0; i < number; ++i) {
      TrajectoryRow row;
      row.input_ids = {1, 2, 3 + i};
      row.logprobs = {0, -4, is_bad && i == 2 ? -700.0 : -4.0};  // ratios above 1, which are not clipped
      row.advantage = -1;
      row.trajectory_id = fmt::format("t{}", i);
      builder.append(row);
    }
    return builder.finish();
  }

  TrainOptions run_of(const std::string& name, int64_t steps, int64_t skip) {
    TrainOptions run = options(name, at::kFloat);
    run.objective.kind = ObjectiveKind::kGrpo;
    run.shuffle = Shuffle::kNone;
    run.batch_size = 2;
    run.steps = steps;
    run.save_every = 1;
    run.skip_bad_steps = skip;
    return run;
  }

  static fs::path step(const TrainOptions& run, int64_t number) { return checkpoint_folder(run.out, number); }

  static void expect_same_weights(const fs::path& a, const fs::path& b) {
    for (const char* name : {"model.safetensors", "optimizer.safetensors"})
      EXPECT_TRUE(read_text(a / name) == read_text(b / name)) << name;
  }
};

TEST_F(BadSteps, ASkippedStepLeavesWeightsAndOptimizerAsTheyAre) {
  const TrainOptions run = run_of("run", 3, 1);
  std::string notes;
  TrainEvents events;
  events.note = [&](const std::string& text) { notes += text + "\n"; };
  ASSERT_TRUE(train(rows(4, true), run, events));
  EXPECT_NE(notes.find("warning: step 2: loss"), std::string::npos) << notes;
  EXPECT_NE(notes.find("token 2 of trajectory `t2` (row 2)"), std::string::npos) << notes;
  EXPECT_NE(notes.find("the gradient of `"), std::string::npos) << notes;
  EXPECT_NE(notes.find("the step has rows 2 (`t2`), 3 (`t3`)"), std::string::npos) << notes;
  EXPECT_NE(notes.find("its update is left out (1 of at most 1)"), std::string::npos) << notes;
  expect_same_weights(step(run, 1), step(run, 2));
  // Steps 1 and 3 have the same rows: the weights are those of two steps on them alone.
  const TrainOptions two = run_of("two", 2, 0);
  ASSERT_TRUE(train(rows(2, false), two, {}));
  expect_same_weights(step(two, 2), step(run, 3));
  EXPECT_NE(read_text(step(run, 2) / "model.safetensors"), read_text(step(run, 3) / "model.safetensors"));
  EXPECT_EQ(read_run_state(step(run, 1)).skipped_steps, 0);
  EXPECT_EQ(read_run_state(step(run, 3)).skipped_steps, 1);
  const std::string metrics = read_text(run.out / "metrics.jsonl");
  EXPECT_EQ(std::ranges::count(metrics, '\n'), 3);
  EXPECT_NE(metrics.find("\"skipped_steps\":1"), std::string::npos) << metrics;
}

TEST_F(BadSteps, OneMoreIsAnErrorAlsoAfterResuming) {
  const Trajectories data = rows(4, true);  // steps 2, 4 and 6 are bad
  TrainOptions run = run_of("run", 8, 1);
  const auto message = [&] { return message_of<RunError>([&] { train(data, run, {}); }); };
  const std::string first = message();
  EXPECT_TRUE(first.starts_with("step 4: loss")) << first;
  EXPECT_NE(first.find("step_3, continue with --resume"), std::string::npos) << first;
  run.resume = true;
  EXPECT_TRUE(message_of<InputError>([&] { train(data, run, {}); }).starts_with("step 4: loss"));
  run.skip_bad_steps = 2;
  EXPECT_TRUE(message().starts_with("step 6: loss"));
  run.steps = 5;
  const TrainOptions whole = run_of("whole", 5, 2);
  ASSERT_TRUE(train(data, whole, {}));
  expect_same_files(step(whole, 5), step(run, 5));
}

TEST_F(BadSteps, AnUpdateThatWouldOverflowIsSkippedToo) {
  TrainOptions run = run_of("run", 9, 3);
  run.optimizer = {.kind = OptimizerKind::kSgd, .max_grad_norm = 0};
  run.learning_rate = kLargestLearningRate;
  run.objective.normalize = Normalize::kConstant;
  run.objective.normalize_constant = 1e-34;
  const std::string message = message_of<RunError>([&] { train(rows(4, false), run, {}); });
  EXPECT_TRUE(message.starts_with("step 4: the update would overflow float32")) << message;
  EXPECT_NE(message.find("the largest gradient is that of `"), std::string::npos) << message;
  EXPECT_NE(message.find("the step has rows 2 (`t2`), 3 (`t3`)"), std::string::npos) << message;
  expect_same_weights(step(run, 1), step(run, 3));
}

TEST(WorstGradient, IsTheOneWithTheLargestShareOfBadValues) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kQwen3, kVocabSize), 7, at::kFloat);
  EXPECT_EQ(worst_gradient(decoder), "");
  for (const Parameter& parameter : decoder.parameters())
    at::Tensor(parameter.value).mutable_grad() = at::ones_like(parameter.value.detach());
  const std::vector<at::Tensor> gradients = decoder.gradients();
  size_t small = 0;
  for (size_t i = 1; i < gradients.size(); ++i) {
    if (gradients[i].numel() < gradients[small].numel()) small = i;
  }
  ASSERT_TRUE(0 < small && small + 1 < gradients.size());  // neither the first nor the last
  gradients[small].mul_(1e6);
  const auto name = [&](size_t i) { return decoder.parameters()[i].name; };
  EXPECT_TRUE(
      worst_gradient(decoder).starts_with(fmt::format("the largest gradient is that of `{}`", name(small))))
      << worst_gradient(decoder);
  for (const at::Tensor& gradient : gradients)
    gradient.view({-1})[0].fill_(std::numeric_limits<float>::quiet_NaN());
  const std::string text = worst_gradient(decoder);
  EXPECT_TRUE(text.starts_with(fmt::format("the gradient of `{}` holds 1 value of", name(small)))) << text;
  EXPECT_TRUE(text.ends_with(fmt::format(", and so do {} other gradients", gradients.size() - 1))) << text;
}

}  // namespace
}  // namespace espalier::testing
