// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/run/trainer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <future>
#include <limits>
#include <set>
#include <thread>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/model/weights/weights.h"
#include "espalier/train/run/checkpoint.h"
#include "tests/base/message_of.h"
#include "tests/engine/outcome.h"
#include "tests/engine/tiny_models.h"
#include "tests/test_seed.h"
#include "tests/train/run/trainer_fixture.h"

namespace espalier::testing {
namespace {

namespace fs = std::filesystem;

// The losses below are what this engine computed on x86-64; to renew them after a change that is meant to
// change them, run the test and copy the list that it prints when it fails.
constexpr double kPinnedLosses[] = {
    3.7448433467489926, 3.7502718886296371, 3.8025767720433326, 3.5252406899465072, 3.2076920304199721,
    3.0328219913712711, 3.1260037599043358, 2.9075627185292423, 2.886403410412905,  2.7212421900066768};

TEST_F(TrainerTest, TenLossesArePinned) {
  const PinnedSeeds pinned;
  TrainOptions run = options("pinned");
  run.optimizer.kind = OptimizerKind::kSgd;
  run.learning_rate = 0.05;
  run.steps = std::size(kPinnedLosses);
  run.scheduler = SchedulerKind::kCosine;
  run.warmup_steps = 2;
  ASSERT_TRUE(train(training_rows(), run, {}));
  const std::vector<double> received = losses(run.out);
  ASSERT_EQ(received.size(), std::size(kPinnedLosses));
  std::string list;
  bool same = true;
  for (size_t i = 0; i < received.size(); ++i) {
    list += fmt::format("{:.17g}, ", received[i]);
    same = same && std::abs(received[i] - kPinnedLosses[i]) <= 1e-9 * std::abs(kPinnedLosses[i]);
  }
  EXPECT_TRUE(same) << list;
}

// Steps are made one ahead; one that cannot be made says so in its turn.
TEST(Steps, OneThatCannotBeMadeAheadIsAnErrorWhenItIsTaken) {
  Trajectories rows = from_rows({{1, 2, 3}, {4, 5, 6}, {7, 8, 9}});
  rows.loss_weights = Column<uint8_t>(std::vector<uint8_t>{1, 1, 1, 0, 0, 0, 1, 1, 1});
  TrainOptions options;
  options.batch_size = 1;
  const Loss loss(rows, options.objective);
  Steps steps(loss, options);
  steps.make_ahead(1);
  EXPECT_EQ(steps.take(0).rows, std::vector<int64_t>{0});
  steps.make_ahead(1);
  EXPECT_NE(message_of<InputError>([&] { steps.take(1); }).find("no token carries loss"), std::string::npos);
  steps.make_ahead(2);
  EXPECT_EQ(steps.take(2).rows, std::vector<int64_t>{2});
}

// What is made in the thread is what would be made without it, whatever is taken meanwhile, in every epoch.
TEST(Steps, ThoseMadeAheadAreTheSame) {
  Trajectories rows = training_rows();
  rows.loss_weights = Column<uint8_t>(std::vector<uint8_t>(rows.num_tokens(), 1));
  TrainOptions options;
  options.batch_size = 3;
  options.shuffle = Shuffle::kRows;
  options.plan.token_budget = 48;
  const Loss loss(rows, options.objective);
  Steps plain(loss, options), ahead(loss, options);
  const auto same = [](const Step& a, const Step& b) {
    if (a.rows != b.rows || a.terms.offsets != b.terms.offsets) return false;
    if (a.plan.micro_batches.size() != b.plan.micro_batches.size()) return false;
    for (size_t i = 0; i < a.terms.values.size(); ++i) {
      if (a.terms.values[i].coefficient != b.terms.values[i].coefficient) return false;
    }
    return a.forest.tokens == b.forest.tokens;
  };
  for (const int64_t index : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 3, 18}) {
    EXPECT_TRUE(same(plain.take(index), ahead.take(index))) << index;
    ahead.make_ahead(index + 1);
  }
  EXPECT_FALSE(same(plain.take(0), plain.take(1)));
}

// The forest waits for what comes after make_ahead: it is not waited for.
TEST(Steps, TheNextOneIsMadeInAThread) {
  Trajectories rows = from_rows({{1, 2, 3}, {4, 5, 6}});
  const std::thread::id own = std::this_thread::get_id();
  std::promise<void> gate;
  std::atomic<bool> elsewhere = false;
  rows.release = [&] {
    elsewhere = std::this_thread::get_id() != own;
    if (elsewhere) gate.get_future().wait();
  };
  TrainOptions options;
  options.batch_size = 1;
  const Loss loss(rows, options.objective);
  Steps steps(loss, options);
  steps.make_ahead(1);
  gate.set_value();
  EXPECT_EQ(steps.take(1).rows, std::vector<int64_t>{1});
  EXPECT_TRUE(elsewhere);
}

struct ResumeCase {
  at::ScalarType dtype, save_dtype;
  OptimizerKind optimizer;
};

TEST_F(TrainerTest, ResumingContinuesBitForBit) {
  const ResumeCase cases[] = {
      {at::kFloat, at::kFloat, OptimizerKind::kAdamW},
      {at::kDouble, at::kDouble, OptimizerKind::kAdamW},
      {at::kBFloat16, at::kBFloat16, OptimizerKind::kAdamW},
      {at::kBFloat16, at::kBFloat16, OptimizerKind::kSgd},
      {at::kFloat, at::kBFloat16, OptimizerKind::kAdamW},
      {at::kDouble, at::kFloat, OptimizerKind::kSgd},
      {at::kBFloat16, at::kFloat, OptimizerKind::kAdamW},
  };
  const Trajectories trajectories = training_rows();
  int number = 0;
  for (const ResumeCase& c : cases) {
    SCOPED_TRACE(fmt::format("{} saved as {}", dtype_name(c.dtype), dtype_name(c.save_dtype)));
    TrainOptions run = options(fmt::format("whole-{}", number), c.dtype);
    run.save_dtype = c.save_dtype;
    run.optimizer.kind = c.optimizer;
    run.optimizer.weight_decay = 0.1;
    run.steps = 6;
    ASSERT_TRUE(train(trajectories, run, {}));
    const fs::path whole = run.out;

    run.out = folder_ / fmt::format("halves-{}", number++);
    run.steps = 3;
    ASSERT_TRUE(train(trajectories, run, {}));
    run.steps = 6;
    run.resume = true;
    ASSERT_TRUE(train(trajectories, run, {}));
    EXPECT_EQ(losses(whole), losses(run.out));
    EXPECT_EQ(losses(whole).size(), 6u);
    expect_same_files(whole / "checkpoints/step_6", run.out / "checkpoints/step_6");
  }
}

TEST_F(TrainerTest, AStopSavesAndTheRunGoesOn) {
  const Trajectories trajectories = training_rows(/*for_grpo=*/true);
  TrainOptions run = options("whole");
  run.objective.kind = ObjectiveKind::kGrpo;
  run.scheduler = SchedulerKind::kCosine;
  run.steps = 5;
  ASSERT_TRUE(train(trajectories, run, {}));
  const fs::path whole = run.out;

  run.out = folder_ / "stopped";
  std::atomic<bool> stop{false};
  TrainEvents events;
  events.step = [&](int64_t step, const nlohmann::ordered_json&) { stop = step == 2; };
  EXPECT_FALSE(train(trajectories, run, events, &stop));
  EXPECT_EQ(newest(run.out), "step_2");
  EXPECT_EQ(losses(run.out).size(), 2u);
  run.resume = true;
  int64_t resumed_from = -1;
  events = {};
  events.started = [&](int64_t total, int64_t first) {
    EXPECT_EQ(total, 5);
    resumed_from = first;
  };
  EXPECT_TRUE(train(trajectories, run, events));
  EXPECT_EQ(resumed_from, 2);
  EXPECT_EQ(losses(whole), losses(run.out));
  expect_same_files(whole / "checkpoints/step_5", run.out / "checkpoints/step_5");
}

TEST_F(TrainerTest, StepsAfterTheLastCheckpointAreDoneAgain) {
  const Trajectories trajectories = training_rows();
  TrainOptions run = options("killed");
  run.steps = 4;
  ASSERT_TRUE(train(trajectories, run, {}));
  // As if the run had been killed after step 4 with a checkpoint at 2 only.
  TrainOptions shorter = options("whole");
  shorter.steps = 4;
  shorter.save_every = 2;
  ASSERT_TRUE(train(trajectories, shorter, {}));
  fs::remove_all(shorter.out / "checkpoints/step_4");
  shorter.resume = true;
  ASSERT_TRUE(train(trajectories, shorter, {}));
  EXPECT_EQ(losses(run.out), losses(shorter.out));
  expect_same_files(run.out / "checkpoints/step_4", shorter.out / "checkpoints/step_4");
}

TEST_F(TrainerTest, ARunIsNotOverwritten) {
  const Trajectories trajectories = training_rows();
  TrainOptions run = options("run");
  run.steps = 1;
  ASSERT_TRUE(train(trajectories, run, {}));
  const std::string metrics = read_text(run.out / "metrics.jsonl");
  const std::string message = message_of<InputError>([&] { train(trajectories, run, {}); });
  EXPECT_NE(message.find("--resume"), std::string::npos) << message;
  EXPECT_EQ(read_text(run.out / "metrics.jsonl"), metrics);
  // A finished run resumed is left as it is.
  run.resume = true;
  EXPECT_TRUE(train(trajectories, run, {}));
  EXPECT_EQ(read_text(run.out / "metrics.jsonl"), metrics);
}

TEST_F(TrainerTest, ResumingWithOtherFlagsOrDataIsRefused) {
  const Trajectories trajectories = training_rows();
  TrainOptions run = options("run");
  run.steps = 1;
  ASSERT_TRUE(train(trajectories, run, {}));
  run.resume = true;
  run.steps = 2;
  TrainOptions changed = run;
  changed.optimizer.beta1 = 0.8;
  const std::string message = message_of<InputError>([&] { train(trajectories, changed, {}); });
  EXPECT_NE(message.find("beta1 was 0.9"), std::string::npos) << message;
  const Trajectories other = from_rows({{1, 2, 3}});
  EXPECT_THROW(train(other, run, {}), InputError);
  changed = run;
  changed.save_every = 1;  // may change, as may the number of steps
  EXPECT_TRUE(train(trajectories, changed, {}));
}

TEST_F(TrainerTest, UnfinishedCheckpointsArePassedOver) {
  const Trajectories trajectories = training_rows();
  TrainOptions run = options("run");
  run.steps = 2;
  ASSERT_TRUE(train(trajectories, run, {}));
  for (const char* name : {".step_9.partial", ".step_3.partial", "step_", "step_7x", "other"}) {
    fs::create_directories(run.out / "checkpoints" / name);
    write_text(run.out / "checkpoints" / name / "junk", "junk");
  }
  EXPECT_EQ(newest(run.out), "step_2");
  run.resume = true;
  run.steps = 3;
  ASSERT_TRUE(train(trajectories, run, {}));
  EXPECT_EQ(newest(run.out), "step_3");
  EXPECT_FALSE(fs::exists(run.out / "checkpoints/step_3/junk"));
  for (const char* name : {".step_9.partial", ".step_3.partial"}) {
    EXPECT_FALSE(fs::exists(run.out / "checkpoints" / name)) << name;
  }
  EXPECT_TRUE(checkpoints(folder_ / "nowhere").empty());
}

TEST_F(TrainerTest, OneSgdStepWithRateOneIsTheGradient) {
  const Trajectories trajectories = training_rows();
  TrainOptions run = options("run");
  run.optimizer = {.kind = OptimizerKind::kSgd, .max_grad_norm = 0};
  run.learning_rate = 1;
  run.steps = 1;
  run.batch_size = 0;
  run.shuffle = Shuffle::kNone;
  ASSERT_TRUE(train(trajectories, run, {}));
  const Decoder before = load_decoder(run.model, at::kDouble);
  const Decoder after = load_decoder(run.out / "checkpoints/step_1", at::kDouble);
  Outcome step;
  for (size_t i = 0; i < before.parameters().size(); ++i) {
    step.gradients.push_back(before.parameters()[i].value.detach() - after.parameters()[i].value.detach());
  }
  EXPECT_LE(gradient_error(step, reference_outcome(before, trajectories, run.objective)), 1e-12);
}

// Eight trajectories of different lengths that share prefixes.
Trajectories eight_rows() {
  Rng rng(test_seed(8));
  std::vector<std::vector<int32_t>> rows;
  for (int64_t row = 0; row < 8; ++row) {
    std::vector<int32_t> tokens{1, 2, 3};
    for (int64_t i = 0; i < 2 + 3 * row; ++i) tokens.push_back(static_cast<int32_t>(rng.below(kVocabSize)));
    rows.push_back(tokens);
  }
  return from_rows(rows);
}

TEST(Accumulation, EightMicroBatchesOfOneEqualOneOfEight) {
  const Trajectories trajectories = eight_rows();
  const Decoder decoder = tiny_decoder(tiny_config(Family::kQwen2, kVocabSize), 4);
  for (const Normalize normalize : {Normalize::kToken, Normalize::kSequence, Normalize::kConstant}) {
    const ObjectiveOptions objective{.normalize = normalize, .normalize_constant = 3};
    const Step whole = make_step(trajectories, all_rows(trajectories),
                                 {.plan = {Strategy::kSequencePacking, 0}, .objective = objective});
    ASSERT_EQ(whole.plan.micro_batches.size(), 1u);
    Plan one_by_one = whole.plan;
    one_by_one.micro_batches.clear();
    for (int64_t row = 0; row < 8; ++row) {
      // The plan of a budget that only one row fits at a time, row by row.
      MicroBatch one;
      const int64_t end = whole.plan.micro_batches[0].trajectories[row].run;
      const int64_t begin = row == 0 ? 0 : whole.plan.micro_batches[0].trajectories[row - 1].run + 1;
      for (int64_t run = begin; run <= end; ++run) {
        espalier::Run copy = whole.plan.micro_batches[0].runs[run];
        copy.parent = run == begin ? -1 : copy.parent - begin;
        one.runs.push_back(copy);
        one.num_tokens += copy.end - copy.begin;
      }
      one.trajectories.push_back({row, end - begin});
      one_by_one.micro_batches.push_back(one);
    }
    Step apart = whole;
    set_plan(&apart, std::move(one_by_one));
    const Outcome together = tree_outcome(decoder, trajectories, whole, objective);
    const Outcome accumulated = tree_outcome(decoder, trajectories, apart, objective);
    EXPECT_LE(gradient_error(accumulated, together), 1e-12);
    EXPECT_NEAR(accumulated.loss, together.loss, 1e-12 * together.loss);
  }
}

TEST(Accumulation, AMeanOfMeansIsSomethingElse) {
  const Trajectories trajectories = eight_rows();
  const Decoder decoder = tiny_decoder(tiny_config(Family::kQwen2, kVocabSize), 4);
  const Outcome together =
      tree_outcome(decoder, trajectories, make_step(trajectories, all_rows(trajectories), {}), {});
  Outcome means;
  for (const at::Tensor& gradient : together.gradients) means.gradients.push_back(at::zeros_like(gradient));
  for (int64_t row = 0; row < 8; ++row) {
    const Outcome one = tree_outcome(decoder, trajectories, make_step(trajectories, {row}, {}), {});
    for (size_t i = 0; i < means.gradients.size(); ++i) means.gradients[i] += one.gradients[i] / 8;
  }
  EXPECT_GT(gradient_error(means, together), 1e-2);
}

Trajectories grouped_rows() {
  TrajectoriesBuilder builder;
  for (int i = 0; i < 24; ++i) {
    builder.append({.input_ids = {1, 2, i % 19}, .group_id = i % 4 == 3 ? "" : fmt::format("g{}", i % 6)});
  }
  return builder.finish();
}

std::vector<int64_t> order_of(const Trajectories& trajectories, Shuffle shuffle, uint64_t seed,
                              int64_t epoch) {
  TrainOptions options;
  options.shuffle = shuffle;
  options.seed = test_seed(seed);
  options.batch_size = 5;
  std::vector<int64_t> order;
  const auto batches = epoch_batches(trajectories, options, epoch);
  EXPECT_EQ(batches.size(), 5u);
  for (size_t b = 0; b < batches.size(); ++b) {
    if (shuffle == Shuffle::kRows) {
      EXPECT_EQ(batches[b].size(), b < 4 ? 5u : 4u);
    }
    order.insert(order.end(), batches[b].begin(), batches[b].end());
  }
  return order;
}

TEST(EpochBatches, EveryRowOnceInAnOrderOfSeedAndEpoch) {
  const Trajectories trajectories = grouped_rows();
  // The rows of a group follow its first one, which stands where it does in the file.
  EXPECT_EQ(order_of(trajectories, Shuffle::kNone, 1, 1),
            (std::vector<int64_t>{0,  6,  12, 18, 1,  13, 2, 8,  14, 20, 3,  4,
                                  10, 16, 22, 5,  17, 7,  9, 21, 11, 15, 19, 23}));
  for (const Shuffle shuffle : {Shuffle::kRows, Shuffle::kGroups}) {
    const std::vector<int64_t> order = order_of(trajectories, shuffle, 1, 0);
    EXPECT_EQ(order, order_of(trajectories, shuffle, 1, 0));
    EXPECT_NE(order, order_of(trajectories, shuffle, 2, 0));
    EXPECT_NE(order, order_of(trajectories, shuffle, 1, 1));
    EXPECT_NE(order, all_rows(trajectories));
    std::vector<int64_t> sorted = order;
    std::sort(sorted.begin(), sorted.end());
    EXPECT_EQ(sorted, all_rows(trajectories));
  }
}

TEST(EpochBatches, GroupsStayTogether) {
  const Trajectories trajectories = grouped_rows();
  const std::vector<int64_t> order = order_of(trajectories, Shuffle::kGroups, 3, 0);
  std::set<std::string> closed;
  std::string current;
  bool singles_apart = false;
  for (size_t i = 0; i < order.size(); ++i) {
    const std::string& group = trajectories.group_id[order[i]];
    if (group == current) {
      if (!group.empty()) {
        EXPECT_LT(order[i - 1], order[i]);
      }
      continue;
    }
    if (!current.empty()) closed.insert(current);
    EXPECT_EQ(closed.count(group), 0u) << group;
    singles_apart |= group.empty() && i > 0;
    current = group;
  }
  EXPECT_TRUE(singles_apart);  // rows without a group are not one group
}

TEST(EpochBatches, TotalSteps) {
  const Trajectories trajectories = grouped_rows();
  TrainOptions options;
  EXPECT_EQ(total_steps(trajectories, options), 1);
  options.batch_size = 5;
  options.epochs = 3;
  EXPECT_EQ(total_steps(trajectories, options), 15);
  options.steps = 7;
  EXPECT_EQ(total_steps(trajectories, options), 7);
}

TEST(EpochBatches, TotalStepsOfHugeNumbersDoNotOverflow) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  const Trajectories trajectories = grouped_rows();
  TrainOptions options;
  options.batch_size = kHuge;
  EXPECT_EQ(total_steps(trajectories, options), 1);
  EXPECT_EQ(epoch_batches(trajectories, options, 0).size(), 1u);
  options.epochs = kMostSteps;
  EXPECT_EQ(total_steps(trajectories, options), kMostSteps);
  for (const auto& [epochs, batch_size] :
       {std::pair(kHuge, kHuge), std::pair(kHuge, int64_t{1}), std::pair(kMostSteps, int64_t{1})}) {
    options.epochs = epochs;
    options.batch_size = batch_size;
    const std::string message = message_of<InputError>([&] { total_steps(trajectories, options); });
    EXPECT_NE(message.find(fmt::format("epochs: {} epochs of", epochs)), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace espalier::testing
