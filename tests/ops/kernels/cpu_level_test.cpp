#include "espalier/ops/kernels/cpu_level.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <random>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/ops/kernels/tile_math.h"
#include "tests/ops/kernels/forced_level.h"

namespace espalier {
namespace {

using testing::ForcedLevel;

std::vector<CpuLevel> levels_of_this_machine() {
  std::vector<CpuLevel> levels{CpuLevel::kDefault};
  if (cpu_level() >= CpuLevel::kAvx2) levels.push_back(CpuLevel::kAvx2);
  if (cpu_level() >= CpuLevel::kAvx512) levels.push_back(CpuLevel::kAvx512);
  if (cpu_level() >= CpuLevel::kAmx) levels.push_back(CpuLevel::kAmx);
  return levels;
}

TEST(CpuLevel, IsTheNamedOne) {
  const CpuLevel best = cpu_level();
  {
    const ForcedLevel level("default");
    EXPECT_EQ(cpu_level(), CpuLevel::kDefault);
  }
  {
    const ForcedLevel none("");
    EXPECT_EQ(cpu_level(), best);
  }
  const ForcedLevel level("avx2");
  if (best >= CpuLevel::kAvx2) {
    EXPECT_EQ(cpu_level(), CpuLevel::kAvx2);
  } else {
    EXPECT_THROW(cpu_level(), InputError);
  }
}

TEST(CpuLevel, UnknownNamesAreRefused) {
  const ForcedLevel level("sse9");
  try {
    cpu_level();
    FAIL();
  } catch (const InputError& error) {
    EXPECT_STREQ(error.what(), "ESPALIER_CPU: expected default, avx2, avx512 or amx, received sse9");
  }
}

// One row that sees one key less than it says: exp2 alone, of every size.
TEST(TileMath, ExponentialIsAccurateAtEveryLevel) {
  constexpr int32_t kRows = 4096;
  for (const CpuLevel level : levels_of_this_machine()) {
    std::mt19937_64 random(1);
    std::vector<float> scores(kKeysAtOnce * kRows), maximum(kRows), sum(kRows), correction(kRows);
    for (int32_t r = 0; r < kRows; ++r) {
      scores[r] = -std::uniform_real_distribution<float>(0, r < 2048 ? 1 : 126)(random);
      scores[kRows + r] = 0;
      maximum[r] = -std::numeric_limits<float>::infinity();
    }
    const std::vector<float> before = scores;
    const std::vector<RowRange> visible(2, {0, kRows});
    const ScoreTile<float> tile{scores.data(), kRows, 2, {0, kRows}, visible.data()};
    tile_math<float>(level).softmax_step(tile, {maximum.data(), sum.data(), correction.data()});
    double worst = 0;
    for (int32_t r = 0; r < kRows; ++r) {
      const double exact = std::exp2(static_cast<double>(before[r]));
      worst = std::max(worst, std::abs(scores[r] - exact) / exact);
      EXPECT_EQ(maximum[r], 0);
      EXPECT_EQ(correction[r], 0);
      EXPECT_NEAR(sum[r], 1 + exact, 2e-7);
    }
    EXPECT_LT(worst, 1.5e-7) << "level " << static_cast<int>(level);
  }
}

TEST(TileMath, ExponentialOfWhatIsFarBelowIsZeroAndOfNanIsNan) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const CpuLevel level : levels_of_this_machine()) {
    std::vector<float> scores(kKeysAtOnce * 3), maximum(3, -1e30f), sum(3), correction(3);
    scores[0] = 0, scores[1] = 0, scores[2] = kNan;
    scores[3] = -130, scores[4] = -std::numeric_limits<float>::infinity(), scores[5] = 0;
    const std::vector<RowRange> visible(2, {0, 3});
    const ScoreTile<float> tile{scores.data(), 3, 2, {0, 3}, visible.data()};
    tile_math<float>(level).softmax_step(tile, {maximum.data(), sum.data(), correction.data()});
    EXPECT_EQ(scores[0], 1);
    EXPECT_EQ(scores[3], 0);
    EXPECT_EQ(scores[4], 0);
    EXPECT_TRUE(std::isnan(sum[2]));
  }
}

}  // namespace
}  // namespace espalier
