// SPDX-License-Identifier: Apache-2.0
// A scratch folder with a model, data to train it on, and what runs left there.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "espalier/base/file.h"
#include "espalier/model/weights/weights.h"
#include "espalier/train/run/checkpoint.h"
#include "espalier/train/run/trainer.h"
#include "tests/base/scratch_folder.h"
#include "tests/engine/tiny_models.h"
#include "tests/test_seed.h"

namespace espalier::testing {

inline constexpr int64_t kVocabSize = 19;

// Enough for three batches of three.
inline Trajectories training_rows(bool for_grpo = false) {
  Rng rng(test_seed(2024));
  for (;;) {
    Trajectories rows = random_trajectories(rng, Shape::kDeep,
                                            {.vocab_size = kVocabSize, .max_rows = 12, .for_grpo = for_grpo});
    if (rows.num_rows() >= 9) return rows;
  }
}

class TrainerTest : public ::testing::Test {
 protected:
  TrainOptions options(const std::string& run, at::ScalarType dtype = at::kDouble) {
    const std::filesystem::path model = folder_ / ("model-" + dtype_name(dtype));
    if (!std::filesystem::exists(model)) write_tiny_model(model, Family::kQwen3, kVocabSize, 77, dtype);
    TrainOptions options;
    options.model = model;
    options.out = folder_ / run;
    options.dtype = options.save_dtype = dtype;
    options.learning_rate = 0.01;
    options.batch_size = 3;
    options.plan.token_budget = 48;
    options.shuffle = Shuffle::kRows;
    return options;
  }

  // Losses by step, as metrics.jsonl has them.
  static std::vector<double> losses(const std::filesystem::path& run) {
    std::vector<double> losses;
    const std::string text = read_text(run / "metrics.jsonl");
    for (size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
      const auto line = nlohmann::json::parse(text.substr(begin, end - begin));
      EXPECT_EQ(line["step"], losses.size() + 1);
      losses.push_back(line["loss"]);
    }
    return losses;
  }

  // Every file of two checkpoints, byte for byte.
  static void expect_same_files(const std::filesystem::path& a, const std::filesystem::path& b) {
    std::set<std::string> names;
    for (const std::filesystem::path& folder : {a, b}) {
      for (const auto& entry : std::filesystem::directory_iterator(folder))
        names.insert(entry.path().filename());
    }
    EXPECT_GE(names.size(), 4u);
    for (const std::string& name : names) {
      EXPECT_TRUE(read_text(a / name) == read_text(b / name)) << name << " differs";
    }
  }

  /// The newest checkpoint's name; "" where there is none.
  static std::string newest(const std::filesystem::path& run) {
    const auto folders = checkpoints(run);
    return folders.empty() ? "" : folders.front().filename().string();
  }

  ScratchFolder folder_;
};

}  // namespace espalier::testing
