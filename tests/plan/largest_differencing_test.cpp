// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "espalier/base/rng.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::seeds;

using Sets = std::vector<std::vector<int64_t>>;

double largest_sum(const std::vector<double>& numbers, const Sets& sets) {
  double largest = 0;
  for (const std::vector<int64_t>& set : sets) {
    double sum = 0;
    for (const int64_t i : set) sum += numbers[i];
    largest = std::max(largest, sum);
  }
  return largest;
}

TEST(LargestDifferencing, TheTextbooksExample) {
  // 8 and 7 differ by 1, 6 and 5 by 1, and 4 stays: 2 in all, although 0 is possible.
  const std::vector<double> numbers{8, 7, 6, 5, 4};
  EXPECT_EQ(largest_sum(numbers, largest_differencing(numbers, 2)), 16);
}

TEST(LargestDifferencing, DividesAllNumbersNotMuchWorseThanAnyOrderWould) {
  for (uint64_t seed = 0; seed < seeds(300); ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(testing::test_seed(seed), 31);
    std::vector<double> numbers(rng.below(30));
    for (double& number : numbers) number = static_cast<double>(rng.below(100));
    const int64_t num_sets = rng.between(1, 6);
    const Sets sets = largest_differencing(numbers, num_sets);
    ASSERT_EQ(static_cast<int64_t>(sets.size()), num_sets);
    std::vector<int64_t> all;
    for (const std::vector<int64_t>& set : sets) {
      ASSERT_TRUE(std::ranges::is_sorted(set));
      all.insert(all.end(), set.begin(), set.end());
    }
    std::ranges::sort(all);
    std::vector<int64_t> expected(numbers.size());
    std::iota(expected.begin(), expected.end(), 0);
    ASSERT_EQ(all, expected);
    // As for every list schedule (Graham, 1966).
    const double sum = std::accumulate(numbers.begin(), numbers.end(), 0.0);
    const double most = numbers.empty() ? 0 : *std::ranges::max_element(numbers);
    ASSERT_LE(largest_sum(numbers, sets), sum / static_cast<double>(num_sets) + most + 1e-9);
  }
}

}  // namespace
}  // namespace espalier
