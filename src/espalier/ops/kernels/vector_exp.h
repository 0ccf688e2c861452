// Exponentials of which compilers make vector instructions. A file that includes this is compiled once per
// CpuLevel and defines ESPALIER_CPU_NAMESPACE: every level has a copy of its own.
#pragma once

#include <cstdint>

namespace espalier::ESPALIER_CPU_NAMESPACE {
namespace {

// 2^x for x <= 0, with 0 below the normal numbers. Range reduction by rounding to the nearest integer;
// minimax polynomial for 2^r on [-1/2, 1/2] of Cephes (S. L. Moshier, exp2f.c, 1984-1994), 2 ulp.
inline float exp2_of(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the rounded x
  const float bounded = x < -126.0f ? -126.0f : x;
  const float shifted = bounded + kRound;
  const float r = bounded - (shifted - kRound);
  float p = 1.535336188319500e-4f;
  p = p * r + 1.339887440266574e-3f;
  p = p * r + 9.618437357674640e-3f;
  p = p * r + 5.550332471162809e-2f;
  p = p * r + 2.402264791363012e-1f;
  p = p * r + 6.931472028550421e-1f;
  p = p * r + 1.0f;
  const uint32_t exponent = __builtin_bit_cast(uint32_t, shifted) << 23;
  const float scaled = __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, p) + exponent);
  return x < -126.0f ? 0.0f : scaled;
}

inline double exp2_of(double x) {
  return __builtin_exp2(x);
}

}  // namespace
}  // namespace espalier::ESPALIER_CPU_NAMESPACE
