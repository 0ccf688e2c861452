// SPDX-License-Identifier: Apache-2.0
// Element types of kernels: double, float, BFloat16 and, on a GPU, Float16.
#pragma once

#include <cstdint>
#include <type_traits>

namespace espalier {

/// A brain floating point number: the upper half of a float32.
struct BFloat16 {
  uint16_t bits;
};

/// IEEE 754 binary16.
struct Float16 {
  uint16_t bits;
};

/// The accumulator type of Element.
template <class Element>
using AccumulatorOf = std::conditional_t<std::is_same_v<Element, double>, double, float>;

}  // namespace espalier
