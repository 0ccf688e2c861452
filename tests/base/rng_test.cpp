// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/rng.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "espalier/base/check.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::test_seed;
using Block = std::array<uint32_t, 4>;

// The known answers that the authors publish with Random123 (kat_vectors, philox4x32 10).
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t all = 0xffffffff;
  EXPECT_EQ(philox4x32({all, all, all, all}, {all, all}),
            (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Rng, ReadsBlocksOfItsSeedAndStreamInOrder) {
  const uint64_t seed = 0x0123456789abcdef, stream = 0xfedcba9876543210;
  Rng rng(seed, stream);
  for (uint32_t index = 0; index < 3; ++index) {
    const Block block = philox4x32({index, 0, 0x76543210, 0xfedcba98}, {0x89abcdef, 0x01234567});
    EXPECT_EQ(rng.next(), block[0] | (static_cast<uint64_t>(block[1]) << 32));
    EXPECT_EQ(rng.next(), block[2] | (static_cast<uint64_t>(block[3]) << 32));
  }
}

TEST(Rng, StreamsAndSeedsDifferAndCopiesContinue) {
  std::set<uint64_t> seen;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    for (uint64_t stream = 0; stream < 20; ++stream) seen.insert(Rng(seed, stream).next());
  }
  EXPECT_EQ(seen.size(), 400u);
  Rng first(3, 4);
  first.next();
  Rng copy = first;
  for (int i = 0; i < 10; ++i) EXPECT_EQ(first.next(), copy.next());
}

TEST(Rng, UniformHasTheMomentsOfTheUniformDistribution) {
  Rng rng(test_seed(7));
  const int count = 200'000;
  double sum = 0, squares = 0;
  std::vector<int> bins(16);
  for (int i = 0; i < count; ++i) {
    const double value = rng.uniform();
    ASSERT_GE(value, 0.0);
    ASSERT_LT(value, 1.0);
    sum += value;
    squares += value * value;
    ++bins[static_cast<int>(value * 16)];
  }
  // Five standard deviations: 1 / sqrt(12 n) and sqrt(4 / 45 n).
  EXPECT_NEAR(sum / count, 0.5, 5 / std::sqrt(12.0 * count));
  EXPECT_NEAR(squares / count, 1.0 / 3, 5 * std::sqrt(4.0 / 45 / count));
  double chi_squared = 0;
  for (const int bin : bins) chi_squared += (bin - count / 16.0) * (bin - count / 16.0) / (count / 16.0);
  EXPECT_LT(chi_squared, 15 + 5 * std::sqrt(30.0));
  EXPECT_GT(chi_squared, 1.0);  // bins as even as this are not random
}

TEST(Rng, NormalHasTheMomentsOfTheNormalDistribution) {
  Rng rng(test_seed(8));
  const int count = 200'000;
  double sum = 0, squares = 0, fourths = 0;
  for (int i = 0; i < count; ++i) {
    const double value = rng.normal();
    ASSERT_TRUE(std::isfinite(value));
    sum += value;
    squares += value * value;
    fourths += value * value * value * value;
  }
  EXPECT_NEAR(sum / count, 0, 5 / std::sqrt(count));
  EXPECT_NEAR(squares / count, 1, 5 * std::sqrt(2.0 / count));
  EXPECT_NEAR(fourths / count, 3, 5 * std::sqrt(96.0 / count));
}

TEST(Rng, BelowStaysInBoundsAndReachesThem) {
  Rng rng(test_seed(9));
  for (const int64_t bound : {int64_t{1}, int64_t{2}, int64_t{3}, int64_t{10}}) {
    std::vector<int> counts(bound);
    for (int i = 0; i < 10'000; ++i) {
      const int64_t value = rng.below(bound);
      ASSERT_GE(value, 0);
      ASSERT_LT(value, bound);
      ++counts[value];
    }
    for (const int count : counts)
      EXPECT_NEAR(count, 10'000.0 / bound, 5 * std::sqrt(10'000.0 / bound) + 1e-9);
  }
  const int64_t largest = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < 1000; ++i) {
    const int64_t value = rng.below(largest);
    ASSERT_GE(value, 0);
    ASSERT_LT(value, largest);
  }
  EXPECT_THROW(rng.below(0), InternalError);
  EXPECT_THROW(rng.below(-1), InternalError);
}

TEST(Rng, BelowHasNoModuloBias) {
  // For the bound 3 * 2^61 plain `% bound` gives the lowest third in 3/8 of the draws.
  Rng rng(test_seed(10));
  const int64_t bound = int64_t{3} << 61;
  int low = 0;
  const int count = 30'000;
  for (int i = 0; i < count; ++i) low += rng.below(bound) < (int64_t{1} << 61);
  EXPECT_NEAR(low, count / 3.0, 5 * std::sqrt(count * 2.0 / 9));
}

TEST(Rng, BetweenIncludesBothEnds) {
  Rng rng(test_seed(11));
  std::set<int64_t> seen;
  for (int i = 0; i < 1000; ++i) seen.insert(rng.between(-2, 2));
  EXPECT_EQ(seen, (std::set<int64_t>{-2, -1, 0, 1, 2}));
  EXPECT_EQ(rng.between(5, 5), 5);
  const int64_t lowest = std::numeric_limits<int64_t>::min(), highest = std::numeric_limits<int64_t>::max();
  int negative = 0;
  for (int i = 0; i < 1000; ++i) negative += rng.between(lowest, highest) < 0;
  EXPECT_NEAR(negative, 500, 80);
  for (int i = 0; i < 100; ++i) EXPECT_GE(rng.between(0, highest), 0);
  EXPECT_THROW(rng.between(1, 0), InternalError);
}

}  // namespace
}  // namespace espalier
