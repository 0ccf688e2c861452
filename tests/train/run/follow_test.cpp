// SPDX-License-Identifier: Apache-2.0
// Runs whose rows come while they go on.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "espalier/base/check.h"
#include "tests/base/message_of.h"
#include "tests/train/run/trainer_fixture.h"

namespace espalier::testing {
namespace {

namespace fs = std::filesystem;

class Follow : public TrainerTest {
 protected:
  TrainOptions run_of(const std::string& name) {
    TrainOptions run = options(name, at::kFloat);
    run.follow = folder_ / "rows";
    fs::create_directories(run.follow);
    run.shuffle = Shuffle::kNone;
    run.steps = 100;
    return run;
  }

  // Rows of five tokens, with those of this seed.
  void come(const std::string& name, int32_t seed, int32_t count = 3) {
    std::vector<std::vector<int32_t>> rows;
    for (int32_t row = 0; row < count; ++row)
      rows.push_back({1, (seed + row) % 19, (seed * 3 + row) % 19, 2, (seed * 7) % 19});
    rows_[name] = from_rows(rows);
    write_text(folder_ / "rows" / name, "");  // the rows are read below
  }
  void stop() const { write_text(folder_ / "rows/stop", ""); }

  TrainEvents events() {
    TrainEvents events;
    events.note = [this](const std::string& text) { notes_ += text + "\n"; };
    events.read = [this](const std::vector<std::string>& names) {
      taken_.push_back(names);
      return rows_.at(names.front());
    };
    return events;
  }

  std::map<std::string, Trajectories> rows_;
  std::vector<std::vector<std::string>> taken_;
  std::string notes_;
};

using Names = std::vector<std::vector<std::string>>;

TEST_F(Follow, FilesAreTakenOnceInTheOrderOfTheirNamesUntilOneSaysStop) {
  const TrainOptions run = run_of("run");
  for (const char* name : {"b.jsonl", "a.jsonl"}) come(name, name[0]);
  for (const char* other : {".c.jsonl", "c.jsonl.tmp", "notes.txt"}) write_text(run.follow / other, "");
  TrainEvents events = this->events();
  events.step = [&](int64_t step, const nlohmann::ordered_json&) {
    if (step == 1) come("0.safetensors", 5);  // after `a`, yet its name is the next one
  };
  const auto note = events.note;
  events.note = [&](const std::string& text) {
    note(text);
    if (!text.starts_with("waiting for rows")) return;
    come("d.jsonl.zst", 9);
    stop();
  };
  ASSERT_TRUE(train({}, run, events));
  EXPECT_EQ(taken_, (Names{{"a.jsonl"}, {"0.safetensors"}, {"b.jsonl"}, {"d.jsonl.zst"}}));
  EXPECT_EQ(notes_.find("waiting"), notes_.rfind("waiting")) << notes_;
  EXPECT_EQ(newest(run.out), "step_4");
  EXPECT_EQ(losses(run.out).size(), 4u);
}

TEST_F(Follow, AFileMayHaveSeveralStepsAndAStepSeveralFiles) {
  TrainOptions run = run_of("run");
  run.batch_size = 2;
  run.follow_files = 2;
  for (const char* name : {"a.jsonl", "b.jsonl", "c.jsonl"}) come(name, name[0]);
  stop();
  ASSERT_TRUE(train({}, run, events()));
  EXPECT_EQ(taken_, (Names{{"a.jsonl", "b.jsonl"}, {"c.jsonl"}}));  // what is left at the end are fewer
  EXPECT_EQ(newest(run.out), "step_4");
}

TEST_F(Follow, EachFileBeginsWithItsFirstRowAndHasItsEpochs) {
  TrainOptions run = run_of("run");
  run.batch_size = 2;
  run.epochs = 3;
  come("a.jsonl", 3, /*count=*/2);
  come("b.jsonl", 4);
  stop();
  std::vector<int64_t> tokens;
  TrainEvents events = this->events();
  events.step = [&](int64_t, const nlohmann::ordered_json& metrics) {
    tokens.push_back(metrics["flat_tokens"]);
  };
  ASSERT_TRUE(train({}, run, events));
  EXPECT_EQ(tokens, (std::vector<int64_t>{10, 10, 10, 10, 5, 10, 5, 10, 5}));
  EXPECT_EQ(taken_, (Names{{"a.jsonl"}, {"b.jsonl"}}));
}

TEST_F(Follow, AResumedRunGoesOnWithTheNextRow) {
  TrainOptions whole = run_of("whole"), run = run_of("run");
  whole.batch_size = run.batch_size = 2;  // two steps of each file
  whole.save_every = run.save_every = 1;
  for (const char* name : {"a.jsonl", "b.jsonl", "c.jsonl"}) come(name, name[0]);
  stop();
  ASSERT_TRUE(train({}, whole, events()));
  for (const int64_t last : {1, 2, 3, 5}) {  // in the middle of a file, and between two
    run.steps = last;
    run.resume = last > 1;
    ASSERT_TRUE(train({}, run, events()));
  }
  run.steps = 100;
  ASSERT_TRUE(train({}, run, events()));
  for (int64_t step = 1; step <= 6; ++step)
    expect_same_files(checkpoint_folder(whole.out, step), checkpoint_folder(run.out, step));
  EXPECT_EQ(losses(whole.out), losses(run.out));
  const size_t before = taken_.size();
  ASSERT_TRUE(train({}, run, events()));  // nothing is left
  EXPECT_EQ(taken_.size(), before);
}

TEST_F(Follow, RowsThatHaveChangedAreRefused) {
  TrainOptions run = run_of("run");
  run.batch_size = 2;
  run.steps = 1;
  come("a.jsonl", 3);
  ASSERT_TRUE(train({}, run, events()));
  come("a.jsonl", 4);
  run.resume = true;
  run.steps = 2;
  std::string message = message_of<InputError>([&] { train({}, run, events()); });
  EXPECT_NE(message.find("the rows that the run has taken are not those of [\"a.jsonl\"]"), std::string::npos)
      << message;
  run.follow = "";
  message = message_of<InputError>([&] { train(training_rows(), run, events()); });
  EXPECT_NE(message.find("the run began with a --follow"), std::string::npos) << message;
}

TEST_F(Follow, AFileThatCannotBeReadIsNotTaken) {
  TrainOptions run = run_of("run");
  come("a.jsonl", 3);
  come("b.jsonl", 4);
  TrainEvents events = this->events();
  const auto read = events.read;
  events.read = [&](const std::vector<std::string>& names) {
    ESPALIER_CHECK(names.front() != "b.jsonl", "b.jsonl:1: a bad row");
    return read(names);
  };
  const std::string message = message_of<RunError>([&] { train({}, run, events); });
  EXPECT_NE(message.find("b.jsonl:1: a bad row; saved "), std::string::npos) << message;
  stop();
  run.resume = true;
  ASSERT_TRUE(train({}, run, this->events()));
  EXPECT_EQ(taken_, (Names{{"a.jsonl"}, {"b.jsonl"}}));
}

TEST_F(Follow, ASignalEndsTheWait) {
  const TrainOptions run = run_of("run");
  come("a.jsonl", 3);
  std::atomic<bool> stops{false};
  TrainEvents events = this->events();
  events.note = [&](const std::string& text) { stops = stops || text.starts_with("waiting for rows"); };
  EXPECT_FALSE(train({}, run, events, &stops));
  EXPECT_EQ(newest(run.out), "step_1");
}

}  // namespace
}  // namespace espalier::testing
