// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/range_minimum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "espalier/base/rng.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

TEST(RangeMinimum, IsTheLeastOfEveryRange) {
  for (size_t size = 1; size < 40; ++size) {
    Rng rng(test_seed(size));
    std::vector<std::pair<int64_t, double>> values;  // equal ones among them
    for (size_t i = 0; i < size; ++i) {
      const int64_t value = rng.between(0, 9);
      values.emplace_back(value, 0.5 * static_cast<double>(value));
    }
    const RangeMinimum minimum(values);
    for (size_t first = 0; first < size; ++first) {
      for (size_t last = first + 1; last <= size; ++last) {
        ASSERT_EQ(minimum(first, last), *std::min_element(&values[first], values.data() + last));
      }
    }
  }
}

}  // namespace
}  // namespace espalier::testing
