// SPDX-License-Identifier: Apache-2.0
// Which checkpoints a run keeps, and which versions of them it takes.
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/manifest.h"
#include "tests/base/message_of.h"
#include "tests/train/run/trainer_fixture.h"

namespace espalier::testing {
namespace {

namespace fs = std::filesystem;

class Checkpoints : public TrainerTest {
 protected:
  TrainOptions run_of(const std::string& name, int64_t steps, int64_t keep_last, int64_t keep_every) {
    TrainOptions run = options(name, at::kFloat);
    run.steps = steps;
    run.save_every = 1;
    run.keep_last = keep_last;
    run.keep_every = keep_every;
    return run;
  }

  static fs::path step(const TrainOptions& run, int64_t number) { return checkpoint_folder(run.out, number); }

  // Names in RUN/checkpoints.
  static std::set<std::string> saved(const fs::path& run) {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(run / "checkpoints"))
      names.insert(entry.path().filename().string());
    return names;
  }
};

TEST_F(Checkpoints, TheNewestAndMultiplesAreKept) {
  struct Case {
    int64_t last, every;
    std::set<std::string> kept;
  };
  int number = 0;
  for (const Case& c : {Case{1, 0, {"step_7"}}, Case{2, 3, {"step_3", "step_6", "step_7"}},
                        Case{3, 7, {"step_5", "step_6", "step_7"}},
                        Case{9, 0, {"step_1", "step_2", "step_3", "step_4", "step_5", "step_6", "step_7"}}}) {
    const TrainOptions run = run_of(fmt::format("run-{}", number++), 7, c.last, c.every);
    ASSERT_TRUE(train(training_rows(), run, {}));
    EXPECT_EQ(saved(run.out), c.kept);
    expect_same_files(step(run, 7), folder_ / "run-0/checkpoints/step_7");
  }
}

TEST_F(Checkpoints, AnOlderOneGoesOnlyAfterANewerOneIsWhole) {
  const TrainOptions run = run_of("run", 5, 1, 0);
  std::vector<std::set<std::string>> at_steps, when_saved;
  TrainEvents events;
  events.step = [&](int64_t number, const nlohmann::ordered_json&) {
    if (number > 1) at_steps.push_back(saved(run.out));
  };
  events.saved = [&](const fs::path& folder) {
    EXPECT_TRUE(check_manifest(folder, folder.filename().string()).faults.empty());
    when_saved.push_back(saved(run.out));
  };
  ASSERT_TRUE(train(training_rows(), run, events));
  for (int64_t number = 1; number < 5; ++number) {
    EXPECT_EQ(at_steps[number - 1], std::set<std::string>{checkpoint_name(number)});
    EXPECT_EQ(when_saved[number],
              (std::set<std::string>{checkpoint_name(number), checkpoint_name(number + 1)}));
  }
}

TEST_F(Checkpoints, AResumedRunRemovesWhatItFinds) {
  TrainOptions run = run_of("run", 4, 0, 0);
  ASSERT_TRUE(train(training_rows(), run, {}));
  EXPECT_EQ(saved(run.out).size(), 4u);
  fs::create_directory(run.out / "checkpoints/best");  // not a step: stays
  run.keep_last = 2;
  run.resume = true;
  run.steps = 5;
  ASSERT_TRUE(train(training_rows(), run, {}));
  EXPECT_EQ(saved(run.out), (std::set<std::string>{"best", "step_4", "step_5"}));
}

TEST_F(Checkpoints, KeepEveryNeedsKeepLast) {
  const TrainOptions run = run_of("run", 4, 0, 2);
  const std::string message = message_of<InputError>([&] { train(training_rows(), run, {}); });
  EXPECT_NE(message.find("--keep-every 2: requires --keep-last N"), std::string::npos) << message;
  EXPECT_FALSE(fs::exists(run.out));
}

// Another Espalier has to continue it; an older checkpoint beside it is no reason to throw its steps away.
TEST_F(Checkpoints, ANewerFormatIsRefusedAndNotPassedOver) {
  TrainOptions run = run_of("run", 3, 0, 0);
  ASSERT_TRUE(train(training_rows(), run, {}));
  const fs::path file = step(run, 3) / kStateFile;
  auto state = nlohmann::ordered_json::parse(read_text(file));
  state["format"] = state["format"].get<int64_t>() + 1;
  write_text(file, state.dump());
  write_manifest(step(run, 3), "step_3");
  run.resume = true;
  run.steps = 5;
  const std::string message = message_of<InputError>([&] { train(training_rows(), run, {}); });
  EXPECT_NE(message.find("a newer Espalier wrote it"), std::string::npos) << message;
  EXPECT_NE(message.find("step_3"), std::string::npos) << message;
  EXPECT_EQ(saved(run.out), (std::set<std::string>{"step_1", "step_2", "step_3"}));
}

// Formats differ by what the last one added: a run of the format before continues with the same bits.
TEST_F(Checkpoints, TheFormatBeforeIsContinued) {
  const TrainOptions whole = run_of("whole", 4, 0, 0);
  ASSERT_TRUE(train(training_rows(), whole, {}));
  TrainOptions run = run_of("run", 2, 0, 0);
  ASSERT_TRUE(train(training_rows(), run, {}));
  auto state = nlohmann::ordered_json::parse(read_text(step(run, 2) / kStateFile));
  EXPECT_EQ(state["format"], 5);
  state["format"] = 4;
  write_text(step(run, 2) / kStateFile, state.dump(2) + "\n");
  write_manifest(step(run, 2), "step_2");
  run.resume = true;
  run.steps = 4;
  ASSERT_TRUE(train(training_rows(), run, {}));
  for (const int64_t number : {3, 4}) expect_same_files(step(whole, number), step(run, number));
}

}  // namespace
}  // namespace espalier::testing
