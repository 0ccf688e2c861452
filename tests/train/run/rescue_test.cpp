// SPDX-License-Identifier: Apache-2.0
// Checkpoints that cannot be written to the folder of a run go to its rescue folder.
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <set>
#include <string>

#include "espalier/base/check.h"
#include "tests/base/message_of.h"
#include "tests/train/run/trainer_fixture.h"

namespace espalier::testing {
namespace {

namespace fs = std::filesystem;

class Rescue : public TrainerTest {
 protected:
  TrainOptions run_of(const std::string& name, int64_t save_every) {
    TrainOptions run = options(name, at::kFloat);
    run.steps = 6;
    run.save_every = save_every;
    run.rescue_dir = folder_ / (name + "-rescue");
    return run;
  }

  // Lets no checkpoint be written; those that are there are kept elsewhere meanwhile.
  static void block(const fs::path& run) {
    fs::rename(run / "checkpoints", run / "kept");
    write_text(run / "checkpoints", "a file in its place");
  }
  static void unblock(const fs::path& run) {
    fs::remove(run / "checkpoints");
    fs::rename(run / "kept", run / "checkpoints");
  }

  static std::set<std::string> saved(const fs::path& run) {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(run / "checkpoints"))
      names.insert(entry.path().filename().string());
    return names;
  }

  std::string notes_;
  TrainEvents events_{.note = [this](const std::string& text) { notes_ += text + "\n"; }};
};

TEST_F(Rescue, AStepThatCannotBeSavedIsContinuedFromTheRescueFolder) {
  const TrainOptions whole = run_of("whole", 1);
  ASSERT_TRUE(train(training_rows(), whole, {}));
  EXPECT_FALSE(fs::exists(whole.rescue_dir / "checkpoints"));
  TrainOptions run = run_of("run", 1);
  events_.step = [&](int64_t step, const nlohmann::ordered_json&) {
    if (step == 3) block(run.out);
  };
  const std::string message = message_of<RunError>([&] { train(training_rows(), run, events_); });
  EXPECT_NE(notes_.find("saved " + checkpoint_folder(run.rescue_dir, 3).string() + " instead"),
            std::string::npos)
      << notes_;
  EXPECT_NE(message.find("step 4 is not saved; step 4 is in " +
                         checkpoint_folder(run.rescue_dir, 4).string() + ": continue with --resume"),
            std::string::npos)
      << message;
  EXPECT_EQ(saved(run.rescue_dir), std::set<std::string>{"step_4"});
  unblock(run.out);
  EXPECT_EQ(saved(run.out), (std::set<std::string>{"step_1", "step_2"}));
  expect_same_files(checkpoint_folder(whole.out, 2), checkpoint_folder(run.out, 2));
  run.resume = true;
  events_.step = nullptr;
  ASSERT_TRUE(train(training_rows(), run, events_));
  EXPECT_EQ(saved(run.rescue_dir), std::set<std::string>{});
  for (const int64_t step : {4, 5, 6})
    expect_same_files(checkpoint_folder(whole.out, step), checkpoint_folder(run.out, step));
  EXPECT_EQ(losses(whole.out), losses(run.out));
}

TEST_F(Rescue, ARescuedStepGoesOnceALaterOneIsSaved) {
  const TrainOptions run = run_of("run", 2);
  events_.step = [&](int64_t step, const nlohmann::ordered_json&) {
    if (step == 4) block(run.out);
    if (step != 5) return;
    EXPECT_EQ(saved(run.rescue_dir), std::set<std::string>{"step_4"});
    unblock(run.out);
  };
  ASSERT_TRUE(train(training_rows(), run, events_));
  EXPECT_EQ(saved(run.out), (std::set<std::string>{"step_2", "step_5", "step_6"}));
  EXPECT_EQ(saved(run.rescue_dir), std::set<std::string>{});
}

TEST_F(Rescue, TheLastStepIsRescuedToo) {
  TrainOptions run = run_of("run", 0);
  run.steps = 2;
  events_.step = [&](int64_t step, const nlohmann::ordered_json&) {
    if (step == 2) write_text(run.out / "checkpoints", "a file in its place");
  };
  const std::string message = message_of<RunError>([&] { train(training_rows(), run, events_); });
  EXPECT_NE(message.find("step 2 is in "), std::string::npos) << message;
  fs::remove(run.out / "checkpoints");
  run.resume = true;
  events_.step = nullptr;
  ASSERT_TRUE(train(training_rows(), run, events_));  // nothing to do but to save it where it belongs
  EXPECT_EQ(saved(run.out), std::set<std::string>{"step_2"});
  EXPECT_EQ(saved(run.rescue_dir), std::set<std::string>{});
}

TEST_F(Rescue, ADamagedOneIsPassedOver) {
  TrainOptions run = run_of("run", 1);
  events_.step = [&](int64_t step, const nlohmann::ordered_json&) {
    if (step == 3) block(run.out);
  };
  EXPECT_NE(message_of<RunError>([&] { train(training_rows(), run, events_); }), "");
  unblock(run.out);
  fs::resize_file(checkpoint_folder(run.rescue_dir, 4) / "optimizer.safetensors", 100);
  run.resume = true;
  events_.step = nullptr;
  ASSERT_TRUE(train(training_rows(), run, events_));
  EXPECT_NE(notes_.find("falling back to " + checkpoint_folder(run.out, 2).string()), std::string::npos)
      << notes_;
  EXPECT_EQ(saved(run.rescue_dir), std::set<std::string>{"step_4.damaged"});
}

TEST_F(Rescue, ARescueFolderThatCannotBeWrittenChangesNothing) {
  const TrainOptions run = run_of("run", 1);
  events_.step = [&](int64_t step, const nlohmann::ordered_json&) {
    if (step != 3) return;
    block(run.out);
    fs::remove_all(run.rescue_dir);
    write_text(run.rescue_dir, "a file in its place");
  };
  const std::string message = message_of<RunError>([&] { train(training_rows(), run, events_); });
  EXPECT_NE(notes_.find("warning: step 3 could not be saved in --rescue-dir either: "), std::string::npos)
      << notes_;
  EXPECT_NE(message.find("step 4 is not saved; saved " + checkpoint_folder(run.out, 2).string()),
            std::string::npos)
      << message;
}

TEST_F(Rescue, ItIsForOneRunAlone) {
  TrainOptions run = run_of("run", 1);
  fs::create_directories(checkpoint_folder(run.rescue_dir, 7));
  const std::string message = message_of<InputError>([&] { train(training_rows(), run, {}); });
  EXPECT_NE(message.find(run.rescue_dir.string() + " holds a run already"), std::string::npos) << message;
  EXPECT_NE(message.find("another --rescue-dir"), std::string::npos) << message;
}

TEST_F(Rescue, TwoRunsCannotHaveTheSame) {
  const TrainOptions run = run_of("run", 1);
  TrainOptions other = run_of("other", 1);
  other.rescue_dir = run.rescue_dir;
  std::string message;
  events_.step = [&](int64_t step, const nlohmann::ordered_json&) {
    if (step == 1) message = message_of<InputError>([&] { train(training_rows(), other, {}); });
  };
  ASSERT_TRUE(train(training_rows(), run, events_));
  EXPECT_TRUE(message.starts_with(run.rescue_dir.string() + ": process ")) << message;
  EXPECT_NE(message.find(" is writing to this folder"), std::string::npos) << message;
  EXPECT_EQ(newest(other.out), "");
  ASSERT_TRUE(train(training_rows(), other, {}));  // once the first has ended
}

TEST_F(Rescue, AFolderThatCannotBeMadeIsAnErrorAtOnce) {
  const TrainOptions run = run_of("run", 1);
  write_text(run.rescue_dir, "a file in its place");
  const std::string message = message_of<InputError>([&] { train(training_rows(), run, {}); });
  EXPECT_NE(message.find("cannot make " + run.rescue_dir.string()), std::string::npos) << message;
}

}  // namespace
}  // namespace espalier::testing
