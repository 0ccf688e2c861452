// SPDX-License-Identifier: Apache-2.0
#include "tests/error_ratio.h"

#include <gtest/gtest.h>

namespace espalier::testing {
namespace {

/// Of 300 values of about 1, whose errors are about these.
SquaredErrors errors_of(double ours, double plain) {
  return {.ours = 300 * ours * ours, .plain = 300 * plain * plain, .exact = 300, .num_values = 300};
}

TEST(ErrorRatio, IsOfBothErrorsWhereNeitherIsBelowTheFloor) {
  const ErrorFloor floor{.unit_roundoff = kFloat32Roundoff};
  EXPECT_DOUBLE_EQ(error_ratio(errors_of(3e-6, 2e-6), floor), 1.5);
  EXPECT_EQ(error_ratio(errors_of(0, 0x1p-26), floor), 1);
  EXPECT_DOUBLE_EQ(error_ratio(errors_of(0x1p-23, 0), floor), 4);
  EXPECT_DOUBLE_EQ(error_ratio(errors_of(3e-6, 0), {kFloat32Roundoff, /*absolute=*/2e-6}), 1.5);
  EXPECT_EQ(error_ratio(errors_of(1, NAN), floor), INFINITY);
  EXPECT_EQ(error_ratio(errors_of(INFINITY, INFINITY), floor), INFINITY);
}

TEST(ErrorRatio, FaultsSayWhatWasExpectedAndReceived) {
  const ErrorFloor floor{.unit_roundoff = kFloat32Roundoff};
  EXPECT_EQ(error_fault(errors_of(1.9e-6, 1e-6), floor), "");
  EXPECT_EQ(error_fault(errors_of(3e-6, 1e-6), floor),
            "expected an error of at most 2 times the plain form's, received 3 times: 3e-06 beside 1e-06");
  SquaredErrors few = errors_of(0, 0);
  few.num_values = 255;
  EXPECT_EQ(error_fault(few, floor), "expected at least 256 values to judge an error by, received 255");
  EXPECT_NE(error_fault(errors_of(NAN, 1e-6), floor), "");
}

}  // namespace
}  // namespace espalier::testing
