// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cpu/head/logit_math.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "tests/ops/kernels/cpu/instruction_sets.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::instruction_sets_of_this_machine;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <class Scalar>
struct Sums {
  explicit Sums(size_t num_rows) : maximum(num_rows, Scalar(-kInfinity)), sum(num_rows, 0) {}
  std::vector<Scalar> maximum, sum;

  ExpSums<Scalar> from(size_t row) { return {maximum.data() + row, sum.data() + row}; }
};

template <class Scalar>
void expect_sums(InstructionSet isa, int64_t width, double tolerance) {
  constexpr int64_t kRows = 3, kStride = 5000;
  std::mt19937_64 random(testing::test_seed(static_cast<uint64_t>(width)));
  std::normal_distribution<Scalar> normal(0, 4);
  std::vector<Scalar> logits(kRows * kStride, Scalar(1e9));  // beyond the width: must not be read
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t w = 0; w < width; ++w) logits[r * kStride + w] = normal(random) - Scalar(1000 * r);
  }
  Sums<Scalar> whole(kRows), halves(kRows);
  const auto& math = logit_math<Scalar>(isa);
  math.add_exps({logits.data(), kStride, kRows, width}, whole.from(0));
  math.add_exps({logits.data(), kStride, kRows, width / 2}, halves.from(0));
  math.add_exps({logits.data() + width / 2, kStride, kRows, width - width / 2}, halves.from(0));
  for (int64_t r = 0; r < kRows; ++r) {
    double maximum = -kInfinity;
    long double sum = 0;
    for (int64_t w = 0; w < width; ++w) maximum = std::max<double>(maximum, logits[r * kStride + w]);
    for (int64_t w = 0; w < width; ++w)
      sum += std::exp(static_cast<long double>(logits[r * kStride + w]) - maximum);
    EXPECT_EQ(whole.maximum[r], maximum);
    EXPECT_LE(std::abs(whole.sum[r] - sum), tolerance * sum);
    EXPECT_EQ(halves.maximum[r], maximum);
    EXPECT_LE(std::abs(halves.sum[r] - sum), tolerance * sum);
    Sums<Scalar> alone(1);
    math.add_exps({logits.data() + r * kStride, kStride, 1, width}, alone.from(0));
    EXPECT_EQ(alone.sum[0], whole.sum[r]);
  }
}

TEST(LogitMath, SumsAreThoseOfTheWholeRowAtEveryInstructionSet) {
  for (const InstructionSet isa : instruction_sets_of_this_machine()) {
    for (const int64_t width : {1, 31, 32, 33, 63, 65, 1023, 2047, 2049, 5000}) {
      SCOPED_TRACE(::testing::Message()
                   << "instruction set " << static_cast<int>(isa) << ", width " << width);
      expect_sums<float>(isa, width, 5e-7);
      expect_sums<double>(isa, width, 1e-15);
    }
  }
}

// One row of differences from 0 down to the end of float's range.
TEST(LogitMath, ExponentialIsAccurateAtEveryInstructionSet) {
  constexpr int64_t kWidth = 9001;
  for (const InstructionSet isa : instruction_sets_of_this_machine()) {
    std::vector<float> values(kWidth);
    for (int64_t w = 0; w < kWidth; ++w) values[w] = -87.0f * static_cast<float>(w) / (kWidth - 1);
    const std::vector<float> before = values;
    const float lse = 0, rest = 0, grad = -1;
    logit_math<float>(isa).differentiate({values.data(), kWidth, 1, kWidth}, {&lse, &rest, &grad});
    double worst = 0;
    for (int64_t w = 0; w < kWidth; ++w) {
      const double exact = std::exp(static_cast<double>(before[w]));
      worst = std::max(worst, std::abs(values[w] - exact) / exact);
    }
    EXPECT_LT(worst, 1.5e-7) << "instruction set " << static_cast<int>(isa);
    EXPECT_EQ(values[0], 1);
  }
}

TEST(LogitMath, GradientsUseTheWholeLogSumExp) {
  for (const InstructionSet isa : instruction_sets_of_this_machine()) {
    // Rounded to float32, 10,000.0003 is 10,000: an error of 3e-4 in every gradient.
    std::vector<float> logits(70, 10'000.0f);
    const float lse = 10'000.0f, rest = 3e-4f, grad = 2;
    logit_math<float>(isa).differentiate({logits.data(), 70, 1, 70}, {&lse, &rest, &grad});
    for (const float gradient : logits) EXPECT_NEAR(gradient, -2 * std::exp(-3e-4), 3e-7);
  }
}

TEST(LogitMath, InfinitiesAndNanGoWhereTheyBelong) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kLow = static_cast<float>(-kInfinity);
  for (const InstructionSet isa : instruction_sets_of_this_machine()) {
    SCOPED_TRACE(static_cast<int>(isa));
    const int64_t width = 2100;  // more than is done at once
    std::vector<float> logits(4 * width, kLow);
    logits[1 * width + width - 1] = 3;
    for (int64_t w = 0; w < width; ++w) logits[2 * width + w] = 1;
    logits[2 * width + 40] = kNan;
    logits[3 * width + 5] = kNan;
    Sums<float> sums(4);
    logit_math<float>(isa).add_exps({logits.data(), width, 4, width}, sums.from(0));
    EXPECT_EQ(sums.maximum[0], kLow);
    EXPECT_EQ(sums.sum[0], 0);
    EXPECT_EQ(sums.maximum[1], 3);
    EXPECT_EQ(sums.sum[1], 1);
    EXPECT_TRUE(std::isnan(sums.sum[2]));
    EXPECT_TRUE(std::isnan(sums.sum[3]));
  }
}

}  // namespace
}  // namespace espalier
