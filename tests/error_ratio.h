// SPDX-License-Identifier: Apache-2.0
// The rule of base/error_ratio.h for tests.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>

#include "espalier/base/error_ratio.h"
#include "tests/test_seed.h"

namespace espalier::testing {

using espalier::error_ratio;
using espalier::ErrorFloor;
using espalier::kBFloat16Roundoff;
using espalier::kFloat16Roundoff;
using espalier::kFloat32Roundoff;
using espalier::kMaxErrorRatio;
using espalier::SquaredErrors;

inline constexpr int64_t kMinPooledValues = 256;

/// How many problems to pool that have so many independent values each. Under sanitizers ratios of errors,
/// which take many, are not judged.
constexpr int64_t draws_for(int64_t values) {
  if (kIsSanitized) return 1;
  return values < kMinPooledValues ? (kMinPooledValues + values - 1) / values : 1;
}

/// What is wrong by the rule, which too few values are as well; empty: nothing.
inline std::string error_fault(const SquaredErrors& errors, const ErrorFloor& floor) {
  if (errors.num_values < kMinPooledValues) {
    return fmt::format("expected at least {} values to judge an error by, received {}", kMinPooledValues,
                       errors.num_values);
  }
  const double ratio = error_ratio(errors, floor);
  if (ratio <= kMaxErrorRatio) return "";
  const double size = errors.exact > 0 ? std::sqrt(errors.exact) : 1;
  return fmt::format(
      "expected an error of at most {:g} times the plain form's, received {:.3g} times: {:.3g} beside {:.3g}",
      kMaxErrorRatio, ratio, std::sqrt(errors.ours) / size, std::sqrt(errors.plain) / size);
}

/// The rule. Fails as well where there are too few values to judge.
inline ::testing::AssertionResult at_most_twice_the_plain_error(const SquaredErrors& errors,
                                                                const ErrorFloor& floor) {
  if (kIsSanitized) return ::testing::AssertionSuccess();
  const std::string fault = error_fault(errors, floor);
  return fault.empty() ? ::testing::AssertionSuccess() : ::testing::AssertionFailure() << fault;
}

}  // namespace espalier::testing
