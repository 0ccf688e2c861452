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

using Bins = std::vector<std::vector<int64_t>>;

/// What best-fit decreasing promises: each item once, no bin too full, no two bins that fit into one.
bool holds(const std::vector<int64_t>& sizes, int64_t capacity, const Bins& bins) {
  std::vector<int64_t> loads, times(sizes.size(), 0);
  for (const auto& bin : bins) {
    int64_t load = 0;
    for (const int64_t item : bin) {
      load += sizes[item];
      ++times[item];
    }
    loads.push_back(load);
  }
  if (std::ranges::any_of(times, [](int64_t t) { return t != 1; })) return false;
  if (std::ranges::any_of(loads, [&](int64_t load) { return load > capacity; })) return false;
  std::sort(loads.begin(), loads.end());
  return loads.size() < 2 || loads[0] + loads[1] > capacity;
}

TEST(BinPacking, Promises) {
  for (uint64_t seed = 0; seed < seeds(500); ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(testing::test_seed(seed), 61);
    const int64_t capacity = rng.between(1, 60);
    std::vector<int64_t> sizes(rng.between(0, 50));
    for (int64_t& size : sizes) size = rng.between(1, capacity);
    ASSERT_TRUE(holds(sizes, capacity, best_fit_decreasing(sizes, capacity)));
  }
}

TEST(BinPacking, FullestBinThatStillHolds) {
  // 6 and 5 open bins. 4 goes to the first, although the second has more free tokens, and 3 goes to the
  // second.
  EXPECT_EQ(best_fit_decreasing({3, 6, 4, 5}, 10), (Bins{{1, 2}, {0, 3}}));
  EXPECT_EQ(best_fit_decreasing({2, 2, 2}, 4), (Bins{{0, 1}, {2}}));
  EXPECT_EQ(best_fit_decreasing({}, 4), Bins{});
}

// Negative control.
TEST(BinPacking, PromiseCheckSeesFaults) {
  EXPECT_TRUE(holds({6, 4, 5}, 10, {{0, 1}, {2}}));
  EXPECT_FALSE(holds({6, 4, 5}, 10, {{0}, {1}, {2}}));
  EXPECT_FALSE(holds({6, 4, 5}, 10, {{0, 2}, {1}}));
  EXPECT_FALSE(holds({6, 4, 5}, 10, {{0, 1}}));
  EXPECT_FALSE(holds({6, 4, 5}, 10, {{0, 1}, {2, 1}}));
}

}  // namespace
}  // namespace espalier
