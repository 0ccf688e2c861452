// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/product_decision.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/plan/time_model.h"
#include "tests/base/message_of.h"
#include "tests/base/scratch_folder.h"
#include "tests/environment_variable.h"
#include "tests/plan/small_decoder.h"

namespace espalier::testing {
namespace {

namespace fs = std::filesystem;

class ProductDecisionTest : public ::testing::Test {
 protected:
  ProductDecision decide(const ProductFeatures& features, const fs::path& folder) {
    notes_.clear();
    const auto note = [&](const std::string& line) { notes_.push_back(line); };
    return decide_products(features, folder, note, [&] {
      ++measured_;
      return measure_();
    });
  }

  std::vector<fs::path> kept() const {
    std::vector<fs::path> files;
    if (fs::exists(folder())) {
      for (const auto& entry : fs::directory_iterator(folder())) files.push_back(entry.path());
    }
    return files;
  }

  fs::path folder() const { return scratch_ / "cache"; }

  ScratchFolder scratch_;
  std::vector<std::string> notes_;
  int measured_ = 0;
  std::function<ProductChoice()> measure_ = [] {  // a measurement takes seconds
    return ProductChoice{Float32Products::kPanels, Bfloat16Products::kNative};
  };
  const ForcedVariable no_bfloat16_{"ESPALIER_BF16_PRODUCTS", nullptr};
  const ForcedVariable no_float32_{"ESPALIER_FLOAT32_PRODUCTS", nullptr};
};

constexpr ProductFeatures kKnown{CpuVendor::kAmd, InstructionSet::kAvx512Bf16, true};
constexpr ProductFeatures kUnknown{CpuVendor::kOtherX86, InstructionSet::kAvx512, true};

// Nothing that a busy machine could change.
TEST_F(ProductDecisionTest, IsThatOfTheFeaturesWithoutMeasuring) {
  const ProductDecision decision = decide(kKnown, folder());
  EXPECT_EQ(decision.choice, choose_by_features(kKnown));
  EXPECT_EQ(decision.reason, "feature: AMD with AVX-512 for bfloat16");
  EXPECT_TRUE(notes_.empty());
  EXPECT_EQ(measured_, 0);
  EXPECT_TRUE(kept().empty());
}

TEST_F(ProductDecisionTest, IsMeasuredOnceWhereFeaturesDoNotTell) {
  const ProductDecision first = decide(kUnknown, folder());
  EXPECT_EQ(to_string(first.choice), "float32=panels,bfloat16=native");
  EXPECT_EQ(measured_, 1);
  EXPECT_EQ(first.reason, "measurement: neither Intel nor AMD with AVX-512");
  EXPECT_EQ(notes_.size(), 1u);
  ASSERT_EQ(kept().size(), 1u);
  EXPECT_EQ(decide(kUnknown, folder()).choice, first.choice);
  EXPECT_TRUE(notes_.empty());

  // What is kept is what counts; another processor has its own.
  const fs::path file = kept().front();
  std::string text = read_text(file);
  const std::string measured = to_string(first.choice);
  const ProductChoice other{first.choice.float32, first.choice.bfloat16 == Bfloat16Products::kLibrary
                                                      ? Bfloat16Products::kUpcast
                                                      : Bfloat16Products::kLibrary};
  text.replace(text.find(measured), measured.size(), to_string(other));
  write_text(file, text);
  EXPECT_EQ(decide(kUnknown, folder()).choice, other);
  EXPECT_TRUE(notes_.empty());
  decide({CpuVendor::kNotX86, InstructionSet::kDefault, true}, folder());
  EXPECT_EQ(notes_.size(), 1u);
  EXPECT_EQ(kept().size(), 2u);

  for (const char* broken :
       {"", "{}", "[1]", R"({"key": 1, "products": "float32=panels,bfloat16=native"})"}) {
    write_text(file, broken);
    decide(kUnknown, folder());
    EXPECT_EQ(notes_.size(), 1u) << broken;
  }
  EXPECT_EQ(measured_, 6);
}

TEST_F(ProductDecisionTest, AMeasurementIsKept) {
  measure_ = measure_products;
  const ProductChoice measured = decide(kUnknown, folder()).choice;
  EXPECT_EQ(decide(kUnknown, folder()).choice, measured);
  EXPECT_EQ(measured_, 1);
}

TEST_F(ProductDecisionTest, DoesWithoutAFolderToKeepIt) {
  write_text(scratch_ / "file", "");
  decide(kUnknown, scratch_ / "file" / "cache");
  ASSERT_EQ(notes_.size(), 2u);
  EXPECT_NE(notes_[1].find("the measurement could not be saved"), std::string::npos) << notes_[1];
}

TEST_F(ProductDecisionTest, IsWhatTheEnvironmentNames) {
  const ForcedVariable upcast("ESPALIER_BF16_PRODUCTS", "upcast");
  const ProductDecision decision = decide(kKnown, folder());
  EXPECT_EQ(to_string(decision.choice), "float32=panels,bfloat16=upcast");
  EXPECT_EQ(decision.reason, "the environment");
}

TEST(KeptProducts, ReadBackBesideTheRates) {
  const ScratchFolder folder;
  const auto file = folder / kCostModelFile;
  const TimeModel rates = assumed_time_model(kSmallDecoder);
  nlohmann::ordered_json json = cost_model_json(rates);
  write_text(file, json.dump(2));
  EXPECT_EQ(read_products(file), std::nullopt);
  const ProductChoice choice{Float32Products::kPanels, Bfloat16Products::kNative};
  add_products(choice, &json);
  write_text(file, json.dump(2));
  EXPECT_EQ(read_products(file), choice);
  EXPECT_EQ(read_cost_model(file, kSmallDecoder).seconds, rates.seconds);
}

TEST(KeptProducts, WhatIsNoneIsRefusedByName) {
  const ScratchFolder folder;
  const auto file = folder / kCostModelFile;
  for (const char* bad : {R"({"matrix_products": 3})", R"({"matrix_products": "float32=fast"})", "{"}) {
    write_text(file, bad);
    const std::string error = message_of<InputError>([&] { read_products(file); });
    EXPECT_TRUE(error.starts_with(file.string())) << error;
  }
}

}  // namespace
}  // namespace espalier::testing
