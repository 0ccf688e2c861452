// SPDX-License-Identifier: Apache-2.0
// Weights for samplers, written while a run goes on.
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <set>
#include <string>

#include "espalier/base/manifest.h"
#include "tests/train/run/trainer_fixture.h"

namespace espalier::testing {
namespace {

namespace fs = std::filesystem;

class Publish : public TrainerTest {
 protected:
  TrainOptions run_of(const std::string& name, int64_t every) {
    TrainOptions run = options(name, at::kFloat);
    run.steps = 5;
    run.save_every = 1;
    run.publish = folder_ / (name + "-published");
    run.publish_every = every;
    return run;
  }

  static std::set<std::string> names_in(const fs::path& folder) {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename().string());
    return names;
  }

  std::string notes_;
  TrainEvents events_{.note = [this](const std::string& text) { notes_ += text + "\n"; }};
};

TEST_F(Publish, TheNewestWeightsAreThereWithoutTrainingState) {
  const TrainOptions run = run_of("run", 2);
  fs::create_directories(run.publish / "step_2");  // of an earlier run: replaced
  write_text(run.publish / "step_2/old.txt", "old");
  std::vector<std::set<std::string>> published;
  events_.saved = [&](const fs::path&) { published.push_back(names_in(run.publish)); };
  ASSERT_TRUE(train(training_rows(), run, events_));
  using Names = std::set<std::string>;
  EXPECT_EQ(published, (std::vector<Names>{
                           {"step_2"}, {"step_2"}, {"step_2"}, {"step_2", "step_4"}, {"step_4", "step_5"}}));
  for (const int64_t step : {4, 5}) {
    const fs::path folder = run.publish / checkpoint_name(step);
    EXPECT_EQ(names_in(folder), (Names{"config.json", "manifest.json", "model.safetensors"}));
    EXPECT_TRUE(read_text(folder / "model.safetensors") ==
                read_text(checkpoint_folder(run.out, step) / "model.safetensors"));
    EXPECT_TRUE(check_manifest(folder, checkpoint_name(step)).faults.empty());
  }
  EXPECT_NE(notes_.find("published " + (run.publish / "step_5").string()), std::string::npos) << notes_;
}

TEST_F(Publish, AnAdapterIsAFolderOfPeft) {
  TrainOptions run = run_of("run", 5);
  run.lora = LoraOptions{.rank = 2, .alpha = 2, .targets = {kAllLinear}};
  ASSERT_TRUE(train(training_rows(), run, {}));
  const fs::path folder = run.publish / "step_5";
  EXPECT_EQ(names_in(folder),
            (std::set<std::string>{"adapter_config.json", "adapter_model.safetensors", "manifest.json"}));
  EXPECT_TRUE(read_text(folder / "adapter_model.safetensors") ==
              read_text(checkpoint_folder(run.out, 5) / "adapter_model.safetensors"));
}

TEST_F(Publish, AFolderThatCannotBeWrittenIsAWarning) {
  const TrainOptions run = run_of("run", 1);
  write_text(run.publish, "a file in its place");
  ASSERT_TRUE(train(training_rows(), run, events_));
  EXPECT_NE(notes_.find("warning: step 5 could not be published: "), std::string::npos) << notes_;
  EXPECT_EQ(newest(run.out), "step_5");
}

}  // namespace
}  // namespace espalier::testing
