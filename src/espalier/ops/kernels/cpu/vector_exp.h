// SPDX-License-Identifier: Apache-2.0
// Exponentials that compilers can vectorise. Included only by files that define ESPALIER_CPU_NAMESPACE, so
// that each instruction set has its own copy.
#pragma once

#include <cstdint>

namespace espalier::ESPALIER_CPU_NAMESPACE {
namespace {

// 2^x for x <= 0, flushed to 0 below the normal numbers. Range reduction by rounding to the nearest integer;
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

// e^x for x below 88, flushed to 0 below the normal numbers. Range reduction by a multiple of ln 2 in two
// parts, the first of which has few bits; minimax polynomial for e^r on [-ln 2 / 2, ln 2 / 2] of Cephes (S.
// L. Moshier, expf.c, 1984-1994), 2 ulp.
inline float exp_of(float x) {
  constexpr float kRound = 12582912.0f;  // as above
  const float bounded = x < -87.0f ? -87.0f : x;
  const float shifted = bounded * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const uint32_t exponent = __builtin_bit_cast(uint32_t, shifted) << 23;
  const float scaled = __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, p) + exponent);
  return x < -87.0f ? 0.0f : scaled;
}

inline double exp_of(double x) {
  return __builtin_exp(x);
}

// Near 0 by the minimax polynomial of Cephes (S. L. Moshier, tanhf.c, 1984-1994), else by e^(-2 |x|), 3 ulp.
inline float tanh_of(float x) {
  const float size = __builtin_fabsf(x), square = x * x;
  float p = -5.70498872745e-3f;
  p = p * square + 2.06390887954e-2f;
  p = p * square + -5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square + -3.33332819422e-1f;
  const float near_zero = p * square * x + x;
  const float e = exp_of(-2 * size);
  const float far = __builtin_copysignf((1 - e) / (1 + e), x);
  return size < 0.625f ? near_zero : far;
}

inline double tanh_of(double x) {
  return __builtin_tanh(x);
}

}  // namespace
}  // namespace espalier::ESPALIER_CPU_NAMESPACE
