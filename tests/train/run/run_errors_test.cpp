// SPDX-License-Identifier: Apache-2.0
// Errors in mid-run: nothing that was done is lost, and nothing that is not whole is saved.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <limits>
#include <optional>
#include <regex>

#include "espalier/base/check.h"
#include "espalier/base/folder_lock.h"
#include "espalier/base/safetensors.h"
#include "espalier/data/builder.h"
#include "espalier/model/weights/tensor_bytes.h"
#include "espalier/train/run/epochs.h"
#include "tests/base/message_of.h"
#include "tests/train/run/trainer_fixture.h"

namespace espalier::testing {
namespace {

namespace fs = std::filesystem;

class RunErrors : public TrainerTest {
 protected:
  static void expect_finite(const fs::path& checkpoint) {
    for (const char* name : {"model.safetensors", "optimizer.safetensors"}) {
      const SafetensorsFile file(checkpoint / name);
      for (const TensorView& tensor : file.tensors()) {
        ASSERT_EQ(tensor.dtype, "F32");
        for (size_t i = 0; i < tensor.bytes.size(); i += sizeof(float)) {
          float value = 0;
          std::memcpy(&value, tensor.bytes.data() + i, sizeof value);
          ASSERT_TRUE(std::isfinite(value)) << name << ", " << tensor.name;
        }
      }
    }
  }

  // Names in RUN/checkpoints, sorted.
  static std::set<std::string> saved(const fs::path& run) {
    std::set<std::string> names;
    if (!fs::exists(run / "checkpoints")) return names;
    for (const auto& entry : fs::directory_iterator(run / "checkpoints"))
      names.insert(entry.path().filename().string());
    return names;
  }
};

TEST_F(RunErrors, AnErrorInALaterStepSavesWhatIsDone) {
  const Trajectories rows = training_rows();
  TrainOptions run = options("whole");
  run.steps = 5;
  ASSERT_TRUE(train(rows, run, {}));
  const fs::path whole = run.out;
  run.out = folder_ / "interrupted";
  TrainEvents events;
  events.step = [](int64_t step, const nlohmann::ordered_json&) {
    if (step == 3) throw std::runtime_error("the roof fell in");
  };
  const std::string message = message_of<RunError>([&] { train(rows, run, events); });
  EXPECT_NE(message.find("the roof fell in"), std::string::npos) << message;
  EXPECT_NE(message.find("step_3, continue with --resume"), std::string::npos) << message;
  EXPECT_EQ(saved(run.out), std::set<std::string>{"step_3"});
  run.resume = true;
  ASSERT_TRUE(train(rows, run, {}));
  expect_same_files(whole / "checkpoints/step_5", run.out / "checkpoints/step_5");
  EXPECT_EQ(losses(whole), losses(run.out));
}

TEST_F(RunErrors, AnErrorInTheFirstStepStaysAsItIs) {
  TrainOptions run = options("run");
  run.steps = 2;
  TrainEvents events;
  events.micro_batch = [](int64_t, int64_t, int64_t) { throw std::length_error("too long"); };
  EXPECT_EQ(message_of<std::length_error>([&] { train(training_rows(), run, events); }), "too long");
  EXPECT_EQ(newest(run.out), "");
}

TEST_F(RunErrors, AVanishedModelFolderIsNoLoss) {
  TrainOptions run = options("whole", at::kFloat);
  for (const char* name : {"tokenizer.json", "LICENSE"})
    write_text(run.model / name, "text of " + std::string(name));
  run.steps = 3;
  run.save_every = 2;
  ASSERT_TRUE(train(training_rows(), run, {}));
  const fs::path whole = run.out;
  run.out = folder_ / "orphan";
  TrainEvents events;
  events.step = [&](int64_t, const nlohmann::ordered_json&) { fs::remove_all(run.model); };
  ASSERT_TRUE(train(training_rows(), run, events));
  EXPECT_FALSE(fs::exists(run.model));
  for (const char* step : {"checkpoints/step_2", "checkpoints/step_3"})
    expect_same_files(whole / step, run.out / step);
  EXPECT_EQ(read_text(run.out / "checkpoints/step_3/tokenizer.json"), "text of tokenizer.json");
}

TEST_F(RunErrors, AStepWithoutLossIsRefusedBeforeTheFirst) {
  Trajectories rows = from_rows({{1, 2, 3}, {4, 5, 6}, {7, 8}, {9, 10}, {11, 12}});
  rows.loss_weights = Column<uint8_t>(std::vector<uint8_t>{1, 1, 1, 1, 1, 1, 1, 0, 1, 0, 1, 1});
  TrainOptions run = options("run");
  run.shuffle = Shuffle::kNone;
  run.batch_size = 2;
  const auto refusal = [&] { return message_of<InputError>([&] { train(rows, run, {}); }); };
  const std::string message = refusal();
  EXPECT_NE(message.find("step 2: no token carries loss in its 2 trajectories, rows 2, 3"), std::string::npos)
      << message;
  EXPECT_FALSE(fs::exists(run.out / "metrics.jsonl"));
  run.steps = 1;  // the step is never taken
  EXPECT_EQ(refusal(), "");
  run.out = folder_ / "mixed";
  run.steps = 0;
  run.batch_size = 3;
  EXPECT_EQ(refusal(), "");
  // Shuffled, the rows meet in some epoch.
  run.out = folder_ / "shuffled";
  run.batch_size = 2;
  run.shuffle = Shuffle::kRows;
  run.epochs = 200;
  EXPECT_TRUE(std::regex_search(refusal(), std::regex("step [0-9]+: no token carries loss"))) << refusal();
}

TEST_F(RunErrors, ABudgetThatIsTooSmallForALaterStepIsRefusedBeforeTheFirst) {
  std::vector<int32_t> longest(40, 1);
  const Trajectories rows = from_rows({{1, 2, 3}, {4, 5, 6}, longest, {7, 8}});
  TrainOptions run = options("run");
  run.shuffle = Shuffle::kNone;
  run.batch_size = 1;
  run.plan = {.strategy = Strategy::kSequencePacking, .token_budget = 20};
  const std::string message = message_of<InputError>([&] { train(rows, run, {}); });
  EXPECT_NE(message.find("budget"), std::string::npos) << message;
  EXPECT_FALSE(fs::exists(run.out / "metrics.jsonl"));
  run.steps = 2;
  EXPECT_TRUE(train(rows, run, {}));
}

TEST_F(RunErrors, OptionsOutOfRangeAreRefused) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN(),
                   kInf = std::numeric_limits<double>::infinity();
  const TrainOptions good = options("run");
  EXPECT_NO_THROW(check_train_options(good));
  const auto refused = [&](const char* name, auto change) {
    TrainOptions bad = good;
    change(&bad);
    const std::string message = message_of<InputError>([&] { train(training_rows(), bad, {}); });
    EXPECT_TRUE(message.starts_with(fmt::format("--{}: expected", name))) << message;
    EXPECT_FALSE(fs::exists(bad.out)) << name;
  };
  for (const double value : {kNan, kInf, -kInf, -1.0, 1e38}) {
    refused("learning-rate", [&](TrainOptions* o) { o->learning_rate = value; });
  }
  for (const double value : {kNan, kInf, -0.1, 1.0, 2.0}) {
    refused("beta1", [&](TrainOptions* o) { o->optimizer.beta1 = value; });
    refused("beta2", [&](TrainOptions* o) { o->optimizer.beta2 = value; });
  }
  for (const double value : {kNan, kInf, -0.1}) {
    refused("weight-decay", [&](TrainOptions* o) { o->optimizer.weight_decay = value; });
    refused("max-grad-norm", [&](TrainOptions* o) { o->optimizer.max_grad_norm = value; });
    refused("eps", [&](TrainOptions* o) { o->optimizer.eps = value; });
    refused("clip-low", [&](TrainOptions* o) { o->objective.clip_low = value; });
    refused("clip-high", [&](TrainOptions* o) { o->objective.clip_high = value; });
    refused("normalize", [&](TrainOptions* o) { o->objective.normalize_constant = value; });
  }
  refused("weight-decay", [&](TrainOptions* o) { o->optimizer.weight_decay = 1.01 / o->learning_rate; });
  refused("eps", [&](TrainOptions* o) { o->optimizer.eps = 0; });
  refused("clip-low", [&](TrainOptions* o) { o->objective.clip_low = 1.5; });
  refused("warmup-steps", [&](TrainOptions* o) { o->warmup_steps = -1; });
  refused("warmup-steps", [&](TrainOptions* o) { o->warmup_steps = INT64_MAX; });
  refused("epochs", [&](TrainOptions* o) { o->epochs = INT64_MAX; });
  refused("epochs", [&](TrainOptions* o) { o->epochs = 0; });
  refused("steps", [&](TrainOptions* o) { o->steps = INT64_MAX; });
  TrainOptions many = good;
  many.epochs = kMostSteps;
  many.batch_size = 1;
  EXPECT_THROW(total_steps(training_rows(), many), InputError);
}

TEST_F(RunErrors, AModelThatIsNotFiniteIsRefusedByName) {
  const TrainOptions run = options("run", at::kFloat);
  const fs::path file = run.model / "model.safetensors";
  std::string text = read_text(file);
  {
    const SafetensorsFile tensors(file);
    const size_t begin =
        tensors.at("model.layers.1.mlp.up_proj.weight").bytes.data() - tensors.mapping()->bytes().data();
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const int64_t i : {3, 7}) std::memcpy(text.data() + begin + 4 * i, &nan, 4);
  }
  write_text(file, text);
  const std::string message = message_of<InputError>([&] { train(training_rows(), run, {}); });
  EXPECT_NE(message.find("tensor `model.layers.1.mlp.up_proj.weight`: as float32 it holds 2 values of 384 "
                         "that are not finite (the first: nan at 3)"),
            std::string::npos)
      << message;
  EXPECT_FALSE(fs::exists(run.out / "metrics.jsonl"));
}

// Gradients of 1e30 times a rate of 1e6 make weights that float32 still holds, and with which nothing can be
// computed: what is saved is the last step whose numbers are finite.
TEST_F(RunErrors, DivergenceStopsBeforeWeightsAreSpoilt) {
  TrainOptions run = options("run", at::kFloat);
  run.optimizer = {.kind = OptimizerKind::kSgd, .max_grad_norm = 0};
  run.learning_rate = kLargestLearningRate;
  run.objective.normalize = Normalize::kConstant;
  run.objective.normalize_constant = 1e-30;
  run.steps = 9;
  const std::string message = message_of<RunError>([&] { train(training_rows(), run, {}); });
  EXPECT_TRUE(std::regex_search(message, std::regex("^step 2: loss .*gradient of `"))) << message;
  EXPECT_TRUE(message.ends_with("checkpoints/step_1, continue with --resume")) << message;
  EXPECT_EQ(saved(run.out), std::set<std::string>{"step_1"});
  expect_finite(run.out / "checkpoints/step_1");
  EXPECT_EQ(losses(run.out).size(), 1u);
}

TEST_F(RunErrors, AnUpdateThatWouldOverflowIsNotDone) {
  for (const OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kAdamW}) {
    TrainOptions run = options(fmt::format("run-{}", static_cast<int>(kind)), at::kFloat);
    run.optimizer = {.kind = kind, .max_grad_norm = 0};
    run.learning_rate = kLargestLearningRate;
    run.objective.normalize = Normalize::kConstant;
    run.objective.normalize_constant = kind == OptimizerKind::kSgd ? 1e-34 : 1e-25;
    const std::string message = message_of<NonFiniteError>([&] { train(training_rows(), run, {}); });
    EXPECT_TRUE(message.starts_with("step 1: ")) << message;
    EXPECT_EQ(newest(run.out), "");
  }
}

TEST_F(RunErrors, APolicyRatioThatOverflowsIsNamed) {
  TrajectoriesBuilder builder;
  for (int32_t i = 0; i < 4; ++i) {
    TrajectoryRow row;
    row.input_ids = {1, 2, 3 + i};
    row.logprobs = {0, -2, i == 2 ? -700.0 : -2.0};
    row.advantage = -1;
    row.trajectory_id = fmt::format("t{}", i);
    builder.append(row);
  }
  TrainOptions run = options("run", at::kFloat);
  run.objective.kind = ObjectiveKind::kGrpo;
  run.shuffle = Shuffle::kNone;
  run.batch_size = 2;
  run.steps = 4;
  const std::string message = message_of<RunError>([&] { train(builder.finish(), run, {}); });
  EXPECT_NE(message.find("step 2: loss"), std::string::npos) << message;
  EXPECT_NE(message.find("token 2 of trajectory `t2` (row 2)"), std::string::npos) << message;
  EXPECT_NE(message.find("`logprobs` of the data say -700"), std::string::npos) << message;
  EXPECT_NE(message.find("step_1, continue with --resume"), std::string::npos) << message;
  expect_finite(run.out / "checkpoints/step_1");
}

// While it lives, files cannot grow beyond some bytes, as on a full disk.
class FullDisk {
 public:
  FullDisk() : handler_(std::signal(SIGXFSZ, SIG_IGN)) { ::getrlimit(RLIMIT_FSIZE, &before_); }
  ~FullDisk() {
    free();
    std::signal(SIGXFSZ, handler_);
  }
  void fill() {
    rlimit small = before_;
    small.rlim_cur = 8192;
    ::setrlimit(RLIMIT_FSIZE, &small);
  }
  void free() { ::setrlimit(RLIMIT_FSIZE, &before_); }

 private:
  rlimit before_{};
  void (*handler_)(int);
};

TEST_F(RunErrors, ACheckpointThatCannotBeWrittenIsTriedAgain) {
  TrainOptions run = options("whole", at::kFloat);
  run.steps = 6;
  run.save_every = 2;
  ASSERT_TRUE(train(training_rows(), run, {}));
  const fs::path whole = run.out;
  run.out = folder_ / "full";
  FullDisk disk;
  std::string notes;
  TrainEvents events;
  events.note = [&](const std::string& text) { notes += text + "\n"; };
  events.step = [&](int64_t step, const nlohmann::ordered_json&) {
    if (step == 2) disk.fill();
    if (step == 3) disk.free();
  };
  EXPECT_TRUE(train(training_rows(), run, events));
  EXPECT_NE(notes.find("step 2 could not be saved"), std::string::npos) << notes;
  EXPECT_NE(notes.find("File too large"), std::string::npos) << notes;
  EXPECT_EQ(saved(run.out), (std::set<std::string>{"step_3", "step_4", "step_6"}));
  expect_same_files(whole / "checkpoints/step_6", run.out / "checkpoints/step_6");
}

TEST_F(RunErrors, CheckpointsThatCannotBeWrittenAreAnError) {
  struct Case {
    int64_t save_every, full_from;
    std::set<std::string> kept;
    const char* words;
  };
  int number = 0;
  for (const Case& c :
       {Case{1, 3, {"step_1", "step_2"}, "step 4 is not saved"},
        Case{2, 3, {"step_2"}, "step 6 is not saved"}, Case{0, 1, {}, "step 6 is not saved"}}) {
    TrainOptions run = options(fmt::format("run-{}", number++), at::kFloat);
    run.steps = 6;
    run.save_every = c.save_every;
    FullDisk disk;
    TrainEvents events;
    events.step = [&](int64_t step, const nlohmann::ordered_json&) {
      if (step == c.full_from) disk.fill();
    };
    const std::string message = message_of<RunError>([&] { train(training_rows(), run, events); });
    disk.free();
    EXPECT_NE(message.find("File too large"), std::string::npos) << message;
    EXPECT_NE(message.find(c.words), std::string::npos) << message;
    EXPECT_EQ(saved(run.out), c.kept);  // and nothing half-written
    run.resume = true;
    EXPECT_TRUE(train(training_rows(), run, {}));
    EXPECT_EQ(newest(run.out), "step_6");
  }
}

TEST_F(RunErrors, MetricsThatCannotBeWrittenStopNothing) {
  TrainOptions run = options("run");
  run.steps = 3;
  fs::create_directories(run.out / "metrics.jsonl");  // a folder in its place
  std::vector<std::string> notes;
  TrainEvents events;
  events.note = [&](const std::string& text) { notes.push_back(text); };
  EXPECT_TRUE(train(training_rows(), run, events));
  EXPECT_EQ(newest(run.out), "step_3");
  int64_t warnings = 0, incomplete = 0;
  for (const std::string& note : notes) {
    warnings += note.find("metrics.jsonl cannot be written: Is a directory") != std::string::npos;
    incomplete += note.find("metrics.jsonl is incomplete: 3 records") != std::string::npos;
  }
  EXPECT_EQ(warnings, 1);
  EXPECT_EQ(incomplete, 1);
}

TEST_F(RunErrors, ARunHasItsFolderForItself) {
  TrainOptions run = options("run");
  run.steps = 2;
  fs::create_directories(run.out);
  {
    const FolderLock lock(run.out, {});
    const std::string message = message_of<InputError>([&] { train(training_rows(), run, {}); });
    EXPECT_NE(message.find("is writing to this folder"), std::string::npos) << message;
    EXPECT_EQ(std::distance(fs::directory_iterator(run.out), {}), 1);  // the lock
  }
  TrainEvents events;
  events.started = [&](int64_t, int64_t) { EXPECT_THROW(FolderLock(run.out, {}), InputError); };
  EXPECT_TRUE(train(training_rows(), run, events));
}

TEST_F(RunErrors, AFolderThatIsRemovedIsMadeAgain) {
  TrainOptions run = options("run");
  run.steps = 4;
  run.save_every = 1;
  std::string notes;
  TrainEvents events;
  events.files = {{"config.toml", "steps = 4\n"}};
  events.note = [&](const std::string& text) { notes += text + "\n"; };
  events.step = [&](int64_t step, const nlohmann::ordered_json&) {
    if (step == 2) fs::remove_all(run.out);
    // The lock is that of the folder which is there.
    if (step == 4) {
      EXPECT_THROW(FolderLock(run.out, {}), InputError);
    }
  };
  EXPECT_TRUE(train(training_rows(), run, events));
  EXPECT_NE(
      notes.find(fmt::format("warning: {} or files in it were removed during the run: .lock, config.toml",
                             run.out.string())),
      std::string::npos)
      << notes;
  EXPECT_NE(notes.find("metrics.jsonl was removed during the run: it starts again at step 3"),
            std::string::npos)
      << notes;
  EXPECT_EQ(read_text(run.out / "config.toml"), "steps = 4\n");
  const std::string metrics = read_text(run.out / "metrics.jsonl");
  EXPECT_TRUE(metrics.starts_with("{\"step\":3,")) << metrics;
  EXPECT_EQ(std::count(metrics.begin(), metrics.end(), '\n'), 2);
  EXPECT_EQ(newest(run.out), "step_4");
  run.resume = true;
  run.steps = 5;
  EXPECT_TRUE(train(training_rows(), run, {}));
}

TEST_F(RunErrors, WhatIsRemovedAfterTheLastCheckpointIsWrittenAgain) {
  for (const bool contents_alone : {false, true}) {
    TrainOptions run = options(contents_alone ? "contents" : "folder");
    run.steps = 2;
    TrainEvents events;
    events.files = {{"config.toml", "steps = 2\n"}};
    int64_t saves = 0;
    events.saved = [&](const fs::path&) {
      if (++saves > 1) return;
      if (!contents_alone) fs::remove_all(run.out);
      for (const char* name : {"checkpoints", "config.toml", "metrics.jsonl"}) fs::remove_all(run.out / name);
    };
    EXPECT_TRUE(train(training_rows(), run, events));
    EXPECT_EQ(saves, 2);
    EXPECT_EQ(newest(run.out), "step_2");
    EXPECT_EQ(read_text(run.out / "config.toml"), "steps = 2\n");
  }
}

TEST_F(RunErrors, AFolderThatCannotBeMadeAgainIsAnError) {
  TrainOptions run = options("run");
  run.steps = 4;
  std::string notes;
  TrainEvents events;
  events.note = [&](const std::string& text) { notes += text + "\n"; };
  events.step = [&](int64_t step, const nlohmann::ordered_json&) {
    if (step != 2) return;
    fs::remove_all(run.out);
    write_text(run.out, "a file in its place");
  };
  const std::string message = message_of<RunError>([&] { train(training_rows(), run, events); });
  EXPECT_NE(message.find("step 4 is not saved"), std::string::npos) << message;
  EXPECT_NE(message.find("no checkpoint was written"), std::string::npos) << message;
  EXPECT_NE(notes.find("the run continues and retries after every step"), std::string::npos) << notes;
}

TEST_F(RunErrors, NothingIsWrittenToAFolderThatAnotherRunHasMadeMeanwhile) {
  TrainOptions run = options("run");
  run.steps = 4;
  std::optional<FolderLock> other;
  TrainEvents events;
  events.step = [&](int64_t step, const nlohmann::ordered_json&) {
    ASSERT_EQ(step, 1);
    fs::remove_all(run.out);
    fs::create_directory(run.out);
    other.emplace(run.out, nullptr);
  };
  const std::string message = message_of<RunError>([&] { train(training_rows(), run, events); });
  EXPECT_NE(message.find("is writing to this folder"), std::string::npos) << message;
  EXPECT_NE(message.find("step 2 is not saved"), std::string::npos) << message;
  EXPECT_EQ(std::distance(fs::directory_iterator(run.out), {}), 1);  // the lock
}

TEST_F(RunErrors, ABestCheckpointThatIsRemovedIsAnErrorUnlessABetterOneFollows) {
  TrainOptions run = options("run");
  run.steps = 2;
  const HeldOut held_out{training_rows(), {.every = 1, .keep_best = true}};
  TrainEvents events;
  events.saved = [&](const fs::path&) { fs::remove_all(run.out); };
  const std::string message =
      message_of<RunError>([&] { train(training_rows(), run, events, nullptr, &held_out); });
  EXPECT_NE(message.find("could not be saved: it was removed during the run"), std::string::npos) << message;
}

TEST_F(RunErrors, AStopBeforeTheFirstStepLeavesNoCheckpoint) {
  TrainOptions run = options("run");
  run.steps = 2;
  const std::atomic<bool> stop{true};
  EXPECT_FALSE(train(training_rows(), run, {}, &stop));
  EXPECT_EQ(newest(run.out), "");
}

}  // namespace
}  // namespace espalier::testing
