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

/// Sanitizers look for other faults, and make emulated kernels ten times slower: there each test has one
/// problem of a kind, and ratios of errors, which take many, are left to the same tests without them.
#ifdef ESPALIER_SANITIZED
inline constexpr bool kIsSanitized = true;
#else
inline constexpr bool kIsSanitized = false;
#endif

/// How many problems to pool that have so many independent values each.
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
