// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/median.h"

#include <gtest/gtest.h>

#include <cmath>

namespace espalier {
namespace {

TEST(Median, OfOddAndEvenNumbers) {
  EXPECT_EQ(median({3}), 3);
  EXPECT_EQ(median({9, 1, 4}), 4);
  EXPECT_EQ(median({4, 9, 1, 2}), 3);
  EXPECT_EQ(median({NAN, 9, NAN, 1, 4}), 9);
  EXPECT_THROW(median({}), InternalError);
}

}  // namespace
}  // namespace espalier
