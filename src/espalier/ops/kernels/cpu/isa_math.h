// SPDX-License-Identifier: Apache-2.0
// What the loops of every InstructionSet compute with, one element at a time: 2^x, e^x, bfloat16. Only files
// that define ESPALIER_CPU_NAMESPACE include this. Each has its own copy, compiled for its own instruction
// set.
#pragma once

#include "espalier/ops/kernels/cpu/vector_exp.h"
#include "espalier/ops/kernels/element.h"

// Before a loop: no iteration reads what another one writes, so it can be vectorised without a check at run
// time.
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
