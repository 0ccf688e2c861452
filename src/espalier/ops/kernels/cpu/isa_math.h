// SPDX-License-Identifier: Apache-2.0
// Scalar functions for the loops of every InstructionSet: 2^x, e^x, bfloat16. Included only by files that
// define ESPALIER_CPU_NAMESPACE, so that each instruction set has its own copy.
#pragma once

#include "espalier/ops/kernels/cpu/vector_exp.h"
#include "espalier/ops/kernels/element.h"

// Before a loop: iterations are independent, so it can be vectorised without runtime checks.
#ifdef __clang__
#define ESPALIER_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define ESPALIER_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif

namespace espalier::ESPALIER_CPU_NAMESPACE {
namespace {

template <class Scalar>
constexpr Scalar kInfinity = Scalar(__builtin_huge_val());

inline float upcast(BFloat16 x) {
  return __builtin_bit_cast(float, uint32_t{x.bits} << 16);
}

inline float upcast(float x) {
  return x;
}

inline double upcast(double x) {
  return x;
}

// Rounds to Element, to nearest even.
template <class Element>
inline Element narrowed(AccumulatorOf<Element> x) {
  if constexpr (std::is_same_v<Element, BFloat16>) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    return {static_cast<uint16_t>(x != x ? 0x7fc0u : rounded)};
  } else {
    return x;
  }
}

}  // namespace
}  // namespace espalier::ESPALIER_CPU_NAMESPACE
