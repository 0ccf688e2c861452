// SPDX-License-Identifier: Apache-2.0
// The rule of base/error_ratio.h for tests.
#pragma once

#include <gtest/gtest.h>

#include "espalier/base/error_ratio.h"
#include "tests/test_seed.h"

namespace espalier::testing {

using espalier::error_ratio;
using espalier::ErrorFloor;
using espalier::kBFloat16Roundoff;
using espalier::kFloat16Roundoff;
using espalier::kFloat32Roundoff;
using espalier::kMaxErrorRatio;
using espalier::kMinPooledValues;
using espalier::SquaredErrors;

/// How many problems to pool that have so many independent values each. Under sanitizers ratios of errors,
/// which take many, are not judged.
constexpr int64_t draws_for(int64_t values) {
  if (kIsSanitized) return 1;
  return values < kMinPooledValues ? (kMinPooledValues + values - 1) / values : 1;
}

/// The rule. Fails as well where there are too few values to judge.
inline ::testing::AssertionResult at_most_twice_the_plain_error(const SquaredErrors& errors,
                                                                const ErrorFloor& floor) {
  if (kIsSanitized) return ::testing::AssertionSuccess();
  const std::string fault = error_fault(errors, floor);
  return fault.empty() ? ::testing::AssertionSuccess() : ::testing::AssertionFailure() << fault;
}

}  // namespace espalier::testing
