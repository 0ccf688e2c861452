// SPDX-License-Identifier: Apache-2.0
// Runs that evaluate rows they are not trained on.
#include "espalier/train/run/evaluation.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <map>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/engine/engine.h"
#include "espalier/train/run/load_model.h"
#include "tests/base/message_of.h"
#include "tests/train/run/trainer_fixture.h"

namespace espalier::testing {
namespace {

namespace fs = std::filesystem;

class EvaluationTest : public TrainerTest {
 protected:
  // More than one micro-batch has tokens.
  static HeldOut held_out(const EvaluationOptions& options) {
    Rng rng(test_seed(99), 0xE7A);
    for (;;) {
      Trajectories rows = random_trajectories(rng, Shape::kMixed, {.vocab_size = kVocabSize});
      if (forest_of(rows, {}).tree_tokens() > 100) return {std::move(rows), options};
    }
  }

  TrainOptions six_steps(const std::string& run) {
    TrainOptions run_options = options(run);
    run_options.steps = 6;
    run_options.save_every = 1;
    return run_options;
  }

  /// Records of evaluations, without times, by their steps.
  static std::map<int64_t, nlohmann::json> evaluations(const fs::path& run) {
    std::map<int64_t, nlohmann::json> found;
    const std::string text = read_text(run / "metrics.jsonl");
    for (size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
      nlohmann::json line = nlohmann::json::parse(text.substr(begin, end - begin));
      if (!line.contains("eval_loss")) continue;
      EXPECT_FALSE(line.contains("loss"));
      line.erase("eval_seconds");
      EXPECT_FALSE(found.contains(line["step"])) << "twice";
      found[line["step"]] = line;
    }
    return found;
  }

  static EvaluationState state_of(const fs::path& checkpoint) {
    return read_state_of_any_folder(checkpoint).evaluation.value_or(EvaluationState{});
  }

  const Trajectories rows_ = training_rows();
};

TEST_F(EvaluationTest, IsTheLossOfTheSavedWeightsAndChangesNothingElse) {
  const TrainOptions run = six_steps("run"), plain = six_steps("plain");
  const HeldOut given = held_out({.every = 2});
  ASSERT_TRUE(train(rows_, run, {}, nullptr, &given));
  ASSERT_TRUE(train(rows_, plain, {}));
  const auto found = evaluations(run.out);
  ASSERT_EQ(found.size(), 3u);
  for (const auto& [step, record] : found) {
    const fs::path folder = checkpoint_folder(run.out, step);
    TrainOptions saved = run;
    saved.model = folder;
    const Decoder decoder = load_model(saved);
    const Loss loss(given.trajectories, run.objective);
    // Whole rows, each by itself, without any tree.
    const Step step_of_rows =
        make_step(given.trajectories, {.plan = {.strategy = Strategy::kSequencePacking}});
    const double expected = finish(start_evaluation(decoder, step_of_rows, loss)).loss;
    EXPECT_NEAR(record["eval_loss"].get<double>(), expected, 1e-12 * std::abs(expected)) << step;
    EXPECT_NEAR(record["eval_nll_per_token"].get<double>(), expected, 1e-12 * std::abs(expected)) << step;
    EXPECT_EQ(state_of(folder).step, step);
    EXPECT_EQ(read_text(folder / "model.safetensors"),
              read_text(checkpoint_folder(plain.out, step) / "model.safetensors"));
  }
  EXPECT_EQ(read_text(checkpoint_folder(plain.out, 6) / kStateFile).find("evaluation"), std::string::npos);
}

TEST_F(EvaluationTest, StoppedInAnEvaluationARunGoesOnBitForBit) {
  const HeldOut given = held_out({.every = 2, .keep_best = true});
  const TrainOptions whole = six_steps("whole");
  ASSERT_TRUE(train(rows_, whole, {}, nullptr, &given));
  for (const int64_t at : {2, 4, 6}) {
    TrainOptions run = six_steps("run-" + std::to_string(at));
    run.save_every = 0;
    std::atomic<bool> stop = false;
    TrainEvents events;
    // The first micro-batch of the evaluation is not the last one.
    events.evaluating = [&](int64_t step, int64_t, int64_t) { stop = stop || step == at; };
    events.step = [&](int64_t step, const auto&) { stop = stop || (step == at && at == 4); };
    EXPECT_FALSE(train(rows_, run, events, &stop, &given));
    EXPECT_EQ(newest(run.out), "step_" + std::to_string(at));
    EXPECT_EQ(evaluations(run.out).count(at), 0u);
    run.resume = true;
    EXPECT_TRUE(train(rows_, run, {}, nullptr, &given));
    EXPECT_EQ(evaluations(run.out), evaluations(whole.out));
    expect_same_files(checkpoint_folder(run.out, 6), checkpoint_folder(whole.out, 6));
    expect_same_files(best_checkpoint_folder(run.out), best_checkpoint_folder(whole.out));
    EXPECT_TRUE(train(rows_, run, {}, nullptr, &given));  // nothing to do
    EXPECT_EQ(evaluations(run.out), evaluations(whole.out));
  }
}

TEST_F(EvaluationTest, TheBestCheckpointIsThatOfTheLowestLoss) {
  TrainOptions run = six_steps("run");
  run.learning_rate = 0.3;  // so large that the loss rises again
  const HeldOut given = held_out({.every = 1, .keep_best = true});
  ASSERT_TRUE(train(rows_, run, {}, nullptr, &given));
  int64_t best = 0;
  double lowest = INFINITY;
  for (const auto& [step, record] : evaluations(run.out)) {
    if (record["eval_loss"] < lowest) {
      best = step;
      lowest = record["eval_loss"];
    }
  }
  EXPECT_LT(best, 6);
  const EvaluationState state = state_of(checkpoint_folder(run.out, 6));
  EXPECT_EQ(state.best_step, best);
  EXPECT_EQ(state.best_loss, lowest);
  EXPECT_EQ(state.since_best, 6 - best);
  expect_same_files(best_checkpoint_folder(run.out), checkpoint_folder(run.out, best));
  EXPECT_EQ(checkpoints(run.out).size(), 6u);
}

TEST_F(EvaluationTest, EndsARunThatGetsNoBetter) {
  TrainOptions run = six_steps("run");
  run.learning_rate = 0;  // no evaluation is better than the first one
  run.save_every = 0;
  HeldOut given = held_out({.every = 1, .early_stop = 2});
  std::vector<std::string> notes;
  TrainEvents events;
  events.note = [&](const std::string& text) { notes.push_back(text); };
  ASSERT_TRUE(train(rows_, run, events, nullptr, &given));
  EXPECT_EQ(newest(run.out), "step_3");
  ASSERT_FALSE(notes.empty());
  EXPECT_NE(notes.back().find("stopped early: 2 evaluations in a row without a loss below"),
            std::string::npos)
      << notes.back();
  EXPECT_NE(notes.back().find("that of step 1"), std::string::npos);
  run.resume = true;
  ASSERT_TRUE(train(rows_, run, events, nullptr, &given));
  EXPECT_EQ(newest(run.out), "step_3");
  EXPECT_NE(notes.back().find("nothing to do: the run has stopped early after step 3"), std::string::npos);
  given.options.early_stop = 4;  // more patience
  ASSERT_TRUE(train(rows_, run, events, nullptr, &given));
  EXPECT_EQ(newest(run.out), "step_5");
  ASSERT_TRUE(train(rows_, run, events));  // without evaluations
  EXPECT_EQ(newest(run.out), "step_6");
}

TEST_F(EvaluationTest, OfOtherRowsCountsAnew) {
  TrainOptions run = six_steps("run");
  run.steps = 2;
  HeldOut given = held_out({.every = 1});
  ASSERT_TRUE(train(rows_, run, {}, nullptr, &given));
  run.steps = 3;
  run.resume = true;
  const HeldOut other{training_rows(), given.options};
  std::string said;
  TrainEvents events;
  events.note = [&](const std::string& text) { said += text + "\n"; };
  ASSERT_TRUE(train(rows_, run, events, nullptr, &other));
  EXPECT_NE(said.find("the held-out rows have changed"), std::string::npos) << said;
  const EvaluationState state = state_of(checkpoint_folder(run.out, 3));
  EXPECT_EQ(state.best_step, 3);
  EXPECT_EQ(evaluations(run.out).size(), 3u);
}

TEST_F(EvaluationTest, ACheckpointThatWasBeingReplacedIsPutBack) {
  TrainOptions run = six_steps("run");
  const HeldOut given = held_out({.every = 1, .keep_best = true});
  run.steps = 2;
  ASSERT_TRUE(train(rows_, run, {}, nullptr, &given));
  const fs::path best = best_checkpoint_folder(run.out), before = best.parent_path() / ".best.before";
  fs::rename(best, before);
  sweep_unfinished_checkpoints(run.out, /*all=*/true);
  EXPECT_TRUE(fs::exists(best / kStateFile));
  EXPECT_FALSE(fs::exists(before));
  fs::create_directories(before);
  fs::create_directories(best.parent_path() / ".best.host-1-2.partial");
  sweep_unfinished_checkpoints(run.out, /*all=*/true);
  EXPECT_TRUE(fs::exists(best / kStateFile));
  EXPECT_FALSE(fs::exists(before));
  EXPECT_FALSE(fs::exists(best.parent_path() / ".best.host-1-2.partial"));
}

TEST_F(EvaluationTest, RefusesRowsThatItCannotUse) {
  const TrainOptions run = six_steps("run");
  HeldOut given = held_out({.every = 1});
  given.trajectories.loss_weights =
      RealColumn(Column<uint8_t>(std::vector<uint8_t>(given.trajectories.num_tokens(), 0)));
  const auto message = [&] {
    return message_of<InputError>([&] { train(rows_, run, {}, nullptr, &given); });
  };
  EXPECT_NE(message().find("eval-data: "), std::string::npos) << message();
  given = held_out({.every = -1});
  EXPECT_NE(message().find("eval-every"), std::string::npos) << message();
  TrainOptions preferences = run;
  preferences.objective = default_options(ObjectiveKind::kDpo);
  given = held_out({});
  const std::string refused = message_of<InputError>([&] { train(rows_, preferences, {}, nullptr, &given); });
  EXPECT_NE(refused, "");
  EXPECT_FALSE(fs::exists(run.out / "metrics.jsonl"));
}

}  // namespace
}  // namespace espalier::testing
