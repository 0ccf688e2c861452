// SPDX-License-Identifier: Apache-2.0
// The one rule by which results in low precision are judged, by `verify`, by kernels that prove themselves
// and by tests: the error of ours against float64 may be at most twice that of the plain form, computed in
// the same dtype.
//
// A ratio of two rounding errors is meaningful only under two conditions:
//
// - Over a few hundred values. The errors of a handful are a matter of luck, and of the CPU, whose order of
//   adding decides them. Where one problem has fewer values, the errors of several problems of its kind are
//   pooled, as if their results were one tensor. Values that share a sum share its rounding as well: the
//   edges of one row of logits, for example, count as one value.
// - Above a floor. Errors below the rounding of the dtype itself (unit roundoff / 2) count as that, on both
//   sides: it is about what rounding the exact result leaves.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace espalier {

inline constexpr double kMaxErrorRatio = 2;

/// Half the distance from 1 to the next number.
inline constexpr double kFloat32Roundoff = 0x1p-24, kFloat16Roundoff = 0x1p-11, kBFloat16Roundoff = 0x1p-8;

/// Sums of squares over the values of one or several results.
struct SquaredErrors {
  double ours = 0, plain = 0;  // of differences from the exact values
  double exact = 0;            // of the exact values
  int64_t num_values = 0;

  void add(double our_value, double plain_value, double exact_value) {
    ours += (our_value - exact_value) * (our_value - exact_value);
    plain += (plain_value - exact_value) * (plain_value - exact_value);
    exact += exact_value * exact_value;
    ++num_values;
  }

  SquaredErrors& operator+=(const SquaredErrors& other) {
    ours += other.ours;
    plain += other.plain;
    exact += other.exact;
    num_values += other.num_values;
    return *this;
  }
};

/// Errors below the floor count as the floor.
struct ErrorFloor {
  double unit_roundoff;  // of the result's dtype; half of it, relative to the exact values, is the floor
  /// Root mean square error per value that is always accepted, for results whose terms cancel: the rounding
  /// of their terms is large beside them.
  double absolute = 0;
};

/// Our error over that of the plain form, both at least the floor. Infinite where either is not finite.
inline double error_ratio(const SquaredErrors& errors, const ErrorFloor& floor) {
  if (!std::isfinite(errors.ours + errors.plain)) return std::numeric_limits<double>::infinity();
  const double least = std::max(floor.unit_roundoff / 2 * std::sqrt(errors.exact),
                                floor.absolute * std::sqrt(static_cast<double>(errors.num_values)));
  const double ours = std::max(std::sqrt(errors.ours), least);
  const double plain = std::max(std::sqrt(errors.plain), least);
  return ours == plain ? 1 : ours / plain;
}

}  // namespace espalier
