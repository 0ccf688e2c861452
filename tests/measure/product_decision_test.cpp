// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/product_decision.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <vector>

#include <fmt/format.h>

#include "espalier/base/file.h"
#include "espalier/ops/gemm/matrix_product.h"
#include "tests/base/scratch_folder.h"
#include "tests/environment_variable.h"
#include "tests/ops/gemm/forced_products.h"

namespace espalier::testing {
namespace {

namespace fs = std::filesystem;

class ProductDecisionTest : public ::testing::Test {
 protected:
  ProductDecision decide(const ProductFeatures& features, const fs::path& folder) {
    notes_.clear();
    return decide_products(features, folder, [&](const std::string& note) { notes_.push_back(note); });
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
  EXPECT_TRUE(kept().empty());
}

TEST_F(ProductDecisionTest, IsMeasuredOnceWhereFeaturesDoNotTell) {
  const ProductDecision first = decide(kUnknown, folder());
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

TEST(GemmRates, AreThoseOfEveryMapPartAndWay) {
  const std::vector<LinearShape> shapes{{"one", 24, 40, 56}, {"two", 8, 16, 8}};
  const std::vector<ProductWay> ways = product_ways();
  ASSERT_GE(ways.size(), 3u);  // float32; bfloat16 upcast and LibTorch's own
  for (size_t i = 0; i < ways.size(); ++i) {
    for (size_t j = 0; j < i; ++j) EXPECT_NE(ways[i].name(), ways[j].name());
  }
  const KernelScope forced(with_products({Float32Products::kLibrary, Bfloat16Products::kNative}));
  const std::vector<GemmRates> all = measure_gemm_rates(shapes, ways, 2);
  EXPECT_EQ(to_string(product_choice()), "float32=library,bfloat16=native");
  ASSERT_EQ(all.size(), 6u);
  for (const GemmRates& rates : all) {
    ASSERT_EQ(rates.seconds.size(), ways.size());
    for (size_t way = 0; way < ways.size(); ++way) {
      EXPECT_EQ(rates.seconds[way].size(), 2u);
      EXPECT_GT(rates.flops_per_second(way), 0);
      EXPECT_EQ(rates.ratio(way, way), 1);
    }
  }
}

TEST(GemmRates, AreMediansOfTheRounds) {
  GemmRates rates;
  rates.shape = {std::string("map"), 10, 20, 30};
  rates.part = LinearPart::kForward;
  rates.seconds = {{3, 1, 2}, {6, 1, 1}};
  EXPECT_EQ(rates.flops_per_second(0), 2.0 * 10 * 20 * 30 / 2);
  EXPECT_EQ(rates.flops_per_second(1), 2.0 * 10 * 20 * 30 / 1);
  EXPECT_EQ(rates.ratio(0, 1), 1);  // of 1/2, 1 and 2
}

TEST(GemmRates, ShapesAreThoseOfTheModel) {
  const ModelSpec spec{
      .hidden_size = 576,
      .vocab_size = 49'152,
      .layers = {{AttentionSpec{.num_attention_heads = 9, .num_key_value_heads = 3, .head_dim = 64},
                  DenseMlpSpec{.intermediate_size = 1536}}}};
  std::vector<std::string> lines;
  for (const LinearShape& shape : linear_shapes(spec, 100)) {
    lines.push_back(fmt::format("{} {} {} {}", shape.name, shape.rows, shape.in, shape.out));
  }
  EXPECT_EQ(lines,
            (std::vector<std::string>{"queries 100 576 576", "keys, values 100 576 192",
                                      "gate, up 100 576 1536", "down 100 1536 576", "head 100 576 16384"}));
}

}  // namespace
}  // namespace espalier::testing
