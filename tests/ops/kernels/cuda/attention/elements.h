// SPDX-License-Identifier: Apache-2.0
// Elements of any type for tests of kernels: random ones, rounding, and errors against float64.
#pragma once

#include <cmath>
#include <random>
#include <vector>

#include "tests/error_ratio.h"
#include "tests/ops/kernels/cuda/emulator.h"

namespace espalier::testing {

template <class Element>
double to_double(Element element) {
  if constexpr (sizeof(Element) == 2) {
    return simt::emulator::to_float(element);
  } else {
    return element;
  }
}

/// To nearest even, by way of float32 for the small ones, as kernels round.
template <class Element>
Element rounded(double value) {
  if constexpr (sizeof(Element) == 2) {
    return {simt::emulator::round_to_bits(static_cast<float>(value), Element{})};
  } else {
    return static_cast<Element>(value);
  }
}

template <class Element>
std::vector<double> to_doubles(const std::vector<Element>& elements) {
  std::vector<double> result;
  result.reserve(elements.size());
  for (const Element& element : elements) result.push_back(to_double(element));
  return result;
}

template <class Element>
constexpr double unit_roundoff() {
  if constexpr (sizeof(Element) == 2) {
    return std::is_same_v<Element, BFloat16> ? kBFloat16Roundoff : kFloat16Roundoff;
  } else {
    static_assert(std::is_same_v<Element, float>, "float64 is not judged by ratio");
    return kFloat32Roundoff;
  }
}

/// Normal ones, of standard deviation `size`.
template <class Element>
std::vector<Element> random_vector(std::mt19937_64& random, int64_t count, double size = 1) {
  std::normal_distribution<double> normal(0, size);
  std::vector<Element> result;
  result.reserve(count);
  for (int64_t i = 0; i < count; ++i) result.push_back(rounded<Element>(normal(random)));
  return result;
}

/// What nobody wrote shows.
template <class Element>
std::vector<Element> unwritten(int64_t count) {
  return std::vector<Element>(count, rounded<Element>(NAN));
}

/// For the rule of tests/error_ratio.h.
template <class A, class B>
SquaredErrors squared_errors(const std::vector<A>& ours, const std::vector<B>& plain,
                             const std::vector<double>& exact) {
  SquaredErrors errors;
  if (ours.size() != exact.size() || plain.size() != exact.size()) errors.ours = INFINITY;
  for (size_t i = 0; i < std::min({ours.size(), plain.size(), exact.size()}); ++i) {
    errors.add(to_double(ours[i]), to_double(plain[i]), exact[i]);
  }
  return errors;
}

/// ||a - b|| / ||b||, or ||a|| where b is 0; infinite where a is not finite.
template <class A, class B>
double relative_error(const std::vector<A>& a, const std::vector<B>& b) {
  double difference = a.size() == b.size() ? 0 : INFINITY, size = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double left = to_double(a[i]), right = to_double(b[i]);
    if (!std::isfinite(left)) return INFINITY;
    difference += (left - right) * (left - right);
    size += right * right;
  }
  return std::sqrt(size > 0 ? difference / size : difference);
}

}  // namespace espalier::testing
