// SPDX-License-Identifier: Apache-2.0
// The rule of base/error_ratio.h for tests.
#pragma once

#include <gtest/gtest.h>

#include "espalier/base/error_ratio.h"

namespace espalier::testing {

using espalier::error_ratio;
using espalier::ErrorFloor;
using espalier::kBFloat16Roundoff;
using espalier::kFloat16Roundoff;
using espalier::kFloat32Roundoff;
using espalier::kMaxErrorRatio;
using espalier::kMinPooledValues;
using espalier::SquaredErrors;

/// How many problems to pool that have so many independent values each.
constexpr int64_t draws_for(int64_t values) {
  return values < kMinPooledValues ? (kMinPooledValues + values - 1) / values : 1;
}

/// The rule. Fails as well where there are too few values to judge.
inline ::testing::AssertionResult at_most_twice_the_plain_error(const SquaredErrors& errors,
                                                                const ErrorFloor& floor) {
  if (errors.num_values < kMinPooledValues) {
    return ::testing::AssertionFailure() << "expected at least " << kMinPooledValues
                                         << " values to judge an error by, received " << errors.num_values;
  }
  const double ratio = error_ratio(errors, floor);
  if (ratio <= kMaxErrorRatio) return ::testing::AssertionSuccess();
  const double size = errors.exact > 0 ? std::sqrt(errors.exact) : 1;
  return ::testing::AssertionFailure()
         << "expected an error of at most " << kMaxErrorRatio << " times the plain form's, received " << ratio
         << " times: " << std::sqrt(errors.ours) / size << " beside " << std::sqrt(errors.plain) / size
         << " (floor " << floor.unit_roundoff / 2 << ") over " << errors.num_values << " values";
}

}  // namespace espalier::testing
