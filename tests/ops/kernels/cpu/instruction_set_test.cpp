// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cpu/instruction_set.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/ops/kernels/cpu/attention/tile_math.h"
#include "tests/ops/kernels/cpu/forced_instruction_set.h"
#include "tests/ops/kernels/cpu/instruction_sets.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::ForcedInstructionSet;
using testing::instruction_sets_of_this_machine;
using testing::test_seed;

InstructionSet best_level() {
  const ForcedInstructionSet none("");
  return instruction_set();
}

TEST(InstructionSet, IsTheNamedOne) {
  const InstructionSet best = best_level();
  {
    const ForcedInstructionSet isa("default");
    EXPECT_EQ(instruction_set(), InstructionSet::kDefault);
  }
  {
    const ForcedInstructionSet unset(nullptr);
    EXPECT_EQ(instruction_set(), best);
  }
  const ForcedInstructionSet isa("avx2");
  if (best >= InstructionSet::kAvx2) {
    EXPECT_EQ(instruction_set(), InstructionSet::kAvx2);
  } else {
    EXPECT_THROW(instruction_set(), InputError);
  }
}

TEST(InstructionSet, UnknownNamesAreRefused) {
  const ForcedInstructionSet isa("sse9");
  try {
    instruction_set();
    FAIL();
  } catch (const InputError& error) {
    EXPECT_STREQ(error.what(),
                 "ESPALIER_CPU: expected default, avx2, avx512, avx512_bf16 or amx, received `sse9`");
  }
}

TEST(InstructionSet, NamesAreThoseThatTheVariableTakes) {
  for (const InstructionSet isa : instruction_sets_of_this_machine()) {
    const ForcedInstructionSet forced(std::string(instruction_set_name(isa)).c_str());
    EXPECT_EQ(instruction_set(), isa);
  }
}

// The system's own list of what the processor has, where there is one.
TEST(InstructionSet, BestIsWhatTheSystemReports) {
  std::ifstream file("/proc/cpuinfo");
  std::set<std::string> flags;
  for (std::string line; flags.empty() && std::getline(file, line);) {
    if (!line.starts_with("flags")) continue;
    std::istringstream words(line);
    flags.insert(std::istream_iterator<std::string>(words), {});
  }
  if (flags.empty()) GTEST_SKIP() << "no flags in /proc/cpuinfo";
  const auto has = [&](std::initializer_list<const char*> names) {
    return std::all_of(names.begin(), names.end(), [&](const char* name) { return flags.contains(name); });
  };
  InstructionSet expected = InstructionSet::kDefault;
  if (has({"avx2", "fma"})) expected = InstructionSet::kAvx2;
  if (expected == InstructionSet::kAvx2 && has({"avx512f", "avx512vl", "avx512bw", "avx512dq"})) {
    expected = InstructionSet::kAvx512;
  }
  if (expected == InstructionSet::kAvx512 && has({"avx512_bf16"})) expected = InstructionSet::kAvx512Bf16;
  if (expected == InstructionSet::kAvx512Bf16 && has({"amx_tile", "amx_bf16"}))
    expected = InstructionSet::kAmx;
  EXPECT_EQ(best_level(), expected);
}

// One row that sees one key less than it says: exp2 alone, of every size.
TEST(TileMath, ExponentialIsAccurateAtEveryInstructionSet) {
  constexpr int32_t kRows = 4096;
  for (const InstructionSet isa : instruction_sets_of_this_machine()) {
    std::mt19937_64 random(test_seed(1));
    std::vector<float> scores(kKeysAtOnce * kRows), maximum(kRows), sum(kRows), correction(kRows);
    for (int32_t r = 0; r < kRows; ++r) {
      scores[r] = -std::uniform_real_distribution<float>(0, r < 2048 ? 1 : 126)(random);
      scores[kRows + r] = 0;
      maximum[r] = -std::numeric_limits<float>::infinity();
    }
    const std::vector<float> before = scores;
    const std::vector<RowRange> visible(2, {0, kRows});
    const ScoreTile<float> tile{scores.data(), kRows, 2, {0, kRows}, visible.data()};
    tile_math<float>(isa).softmax_step(tile, {maximum.data(), sum.data(), correction.data()});
    double worst = 0;
    for (int32_t r = 0; r < kRows; ++r) {
      const double exact = std::exp2(static_cast<double>(before[r]));
      worst = std::max(worst, std::abs(scores[r] - exact) / exact);
      EXPECT_EQ(maximum[r], 0);
      EXPECT_EQ(correction[r], 0);
      EXPECT_NEAR(sum[r], 1 + exact, 2e-7);
    }
    EXPECT_LT(worst, 1.5e-7) << "instruction set " << static_cast<int>(isa);
  }
}

TEST(TileMath, ExponentialOfWhatIsFarBelowIsZeroAndOfNanIsNan) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const InstructionSet isa : instruction_sets_of_this_machine()) {
    std::vector<float> scores(kKeysAtOnce * 3), maximum(3, -1e30f), sum(3), correction(3);
    scores[0] = 0, scores[1] = 0, scores[2] = kNan;
    scores[3] = -130, scores[4] = -std::numeric_limits<float>::infinity(), scores[5] = 0;
    const std::vector<RowRange> visible(2, {0, 3});
    const ScoreTile<float> tile{scores.data(), 3, 2, {0, 3}, visible.data()};
    tile_math<float>(isa).softmax_step(tile, {maximum.data(), sum.data(), correction.data()});
    EXPECT_EQ(scores[0], 1);
    EXPECT_EQ(scores[3], 0);
    EXPECT_EQ(scores[4], 0);
    EXPECT_TRUE(std::isnan(sum[2]));
  }
}

}  // namespace
}  // namespace espalier
