// SPDX-License-Identifier: Apache-2.0
// The loops of TileMath, compiled for the instruction set of the including file, which defines
// ESPALIER_CPU_NAMESPACE. Must not call inline functions of headers other than isa_math.h: the linker would
// merge their copies for different instruction sets.
//   p = 2^(s - m), s = scores to base 2 (docs/math.md). Loops vectorise over adjacent rows, so sums over keys
//   are vertical and in key order, independent of the vector width. Accumulator: Scalar.
#pragma once

#include <cstdint>
#include <type_traits>

#include "espalier/ops/kernels/cpu/attention/tile_math.h"
#include "espalier/ops/kernels/cpu/isa_math.h"

namespace espalier::ESPALIER_CPU_NAMESPACE {
namespace {

template <class Scalar>
inline Scalar larger(Scalar a, Scalar b) {
  return a > b ? a : b;
}

// Masks the scores of rows that do not see a key.
template <class Scalar>
void fill_invisible(const ScoreTile<Scalar>& tile, Scalar* scores, int32_t key, Scalar value) {
  Scalar* __restrict s = scores + key * tile.stride;
  for (int32_t r = tile.rows.begin; r < tile.visible[key].begin; ++r) s[r] = value;
  for (int32_t r = tile.visible[key].end; r < tile.rows.end; ++r) s[r] = value;
}

// Eight keys at a time: one load and store of the row state per eight keys, and fewer roundings of the sums.
static_assert(kKeysAtOnce == 8);

template <class Scalar>
void raise_maximum(const ScoreTile<Scalar>& tile, const Scalar* __restrict s0, Scalar* __restrict maximum) {
  const Scalar* __restrict s1 = s0 + tile.stride;
  const Scalar* __restrict s2 = s1 + tile.stride;
  const Scalar* __restrict s3 = s2 + tile.stride;
  const Scalar* __restrict s4 = s3 + tile.stride;
  const Scalar* __restrict s5 = s4 + tile.stride;
  const Scalar* __restrict s6 = s5 + tile.stride;
  const Scalar* __restrict s7 = s6 + tile.stride;
  ESPALIER_INDEPENDENT_ITERATIONS
  for (int32_t r = tile.rows.begin; r < tile.rows.end; ++r) {
    const Scalar low = larger(larger(s0[r], s1[r]), larger(s2[r], s3[r]));
    const Scalar high = larger(larger(s4[r], s5[r]), larger(s6[r], s7[r]));
    maximum[r] = larger(larger(low, high), maximum[r]);
  }
}

template <class Scalar>
void exponentiate(const ScoreTile<Scalar>& tile, Scalar* __restrict s0, const Scalar* __restrict maximum,
                  Scalar* __restrict sum) {
  Scalar* __restrict s1 = s0 + tile.stride;
  Scalar* __restrict s2 = s1 + tile.stride;
  Scalar* __restrict s3 = s2 + tile.stride;
  Scalar* __restrict s4 = s3 + tile.stride;
  Scalar* __restrict s5 = s4 + tile.stride;
  Scalar* __restrict s6 = s5 + tile.stride;
  Scalar* __restrict s7 = s6 + tile.stride;
  ESPALIER_INDEPENDENT_ITERATIONS
  for (int32_t r = tile.rows.begin; r < tile.rows.end; ++r) {
    // Avoid inf - inf = NaN.
    const Scalar m = maximum[r] == -kInfinity<Scalar> ? Scalar(0) : maximum[r];
    const Scalar p0 = exp2_of(s0[r] - m), p1 = exp2_of(s1[r] - m);
    const Scalar p2 = exp2_of(s2[r] - m), p3 = exp2_of(s3[r] - m);
    const Scalar p4 = exp2_of(s4[r] - m), p5 = exp2_of(s5[r] - m);
    const Scalar p6 = exp2_of(s6[r] - m), p7 = exp2_of(s7[r] - m);
    s0[r] = p0, s1[r] = p1, s2[r] = p2, s3[r] = p3;
    s4[r] = p4, s5[r] = p5, s6[r] = p6, s7[r] = p7;
    sum[r] += ((p0 + p1) + (p2 + p3)) + ((p4 + p5) + (p6 + p7));
  }
}

template <class Scalar>
void cap_scores(const ScoreTile<Scalar>& tile, Scalar cap) {
  const Scalar inverse = 1 / cap;
  for (int32_t key = 0; key < tile.num_keys; ++key) {
    Scalar* __restrict s = tile.scores + key * tile.stride;
    for (int32_t r = tile.visible[key].begin; r < tile.visible[key].end; ++r) {
      s[r] = cap * tanh_of(s[r] * inverse);
    }
  }
}

template <class Scalar>
void softmax_step(const ScoreTile<Scalar>& tile, const SoftmaxState<Scalar>& state) {
  Scalar* __restrict maximum = state.maximum;
  Scalar* __restrict correction = state.correction;
  for (int32_t r = tile.rows.begin; r < tile.rows.end; ++r) correction[r] = maximum[r];
  for (int32_t key = 0; key < tile.num_keys; ++key) {
    fill_invisible(tile, tile.scores, key, -kInfinity<Scalar>);
  }
  int32_t padded_keys = tile.num_keys;
  for (; padded_keys % kKeysAtOnce != 0; ++padded_keys) {
    Scalar* __restrict s = tile.scores + padded_keys * tile.stride;
    for (int32_t r = tile.rows.begin; r < tile.rows.end; ++r) s[r] = -kInfinity<Scalar>;
  }
  for (int32_t key = 0; key < padded_keys; key += kKeysAtOnce) {
    raise_maximum(tile, tile.scores + key * tile.stride, maximum);
  }
  for (int32_t r = tile.rows.begin; r < tile.rows.end; ++r) {
    correction[r] = maximum[r] == -kInfinity<Scalar> ? Scalar(0) : exp2_of(correction[r] - maximum[r]);
    state.sum[r] *= correction[r];
  }
  for (int32_t key = 0; key < padded_keys; key += kKeysAtOnce) {
    exponentiate(tile, tile.scores + key * tile.stride, maximum, state.sum);
  }
}

template <class Scalar>
void differentiate(const ScoreTile<Scalar>& tile, const ScoreGradient<Scalar>& gradient) {
  const Scalar* __restrict lse2 = gradient.lse2;
  const Scalar* __restrict lse2_rest = gradient.lse2_rest;
  const Scalar* __restrict delta = gradient.delta;
  for (int32_t key = 0; key < tile.num_keys; ++key) {
    Scalar* __restrict s = tile.scores + key * tile.stride;
    Scalar* __restrict d = gradient.tile + key * tile.stride;
    for (int32_t r = tile.visible[key].begin; r < tile.visible[key].end; ++r) {
      const Scalar p = exp2_of((s[r] - lse2[r]) - lse2_rest[r]);
      s[r] = p;
      d[r] = p * (d[r] - delta[r]);
    }
    fill_invisible(tile, tile.scores, key, Scalar(0));
    fill_invisible(tile, gradient.tile, key, Scalar(0));
  }
}

template <class Scalar>
void differentiate_capped(const ScoreTile<Scalar>& tile, const ScoreGradient<Scalar>& gradient, Scalar cap) {
  const Scalar* __restrict lse2 = gradient.lse2;
  const Scalar* __restrict lse2_rest = gradient.lse2_rest;
  const Scalar* __restrict delta = gradient.delta;
  const Scalar inverse = 1 / cap;
  for (int32_t key = 0; key < tile.num_keys; ++key) {
    Scalar* __restrict s = tile.scores + key * tile.stride;
    Scalar* __restrict d = gradient.tile + key * tile.stride;
    for (int32_t r = tile.visible[key].begin; r < tile.visible[key].end; ++r) {
      const Scalar t = tanh_of(s[r] * inverse);
      const Scalar p = exp2_of((cap * t - lse2[r]) - lse2_rest[r]);
      s[r] = p;
      d[r] = p * (d[r] - delta[r]) * (1 - t * t);
    }
    fill_invisible(tile, tile.scores, key, Scalar(0));
    fill_invisible(tile, gradient.tile, key, Scalar(0));
  }
}

template <class Scalar>
void copy_rows(const Rows<const Scalar>& from, Scalar* to) {
  for (int64_t r = 0; r < from.num_rows; ++r) {
    const Scalar* __restrict in = from.data + r * from.stride;
    Scalar* __restrict out = to + r * from.width;
    for (int64_t w = 0; w < from.width; ++w) out[w] = in[w];
  }
}

template <class Scalar>
void scale_rows(const Rows<Scalar>& rows, const Scalar* factor) {
  for (int64_t r = 0; r < rows.num_rows; ++r) {
    Scalar* __restrict row = rows.data + r * rows.stride;
    const Scalar f = factor[r];
    for (int64_t w = 0; w < rows.width; ++w) row[w] *= f;
  }
}

inline float fused(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}

inline double fused(double a, double b, double c) {
  return __builtin_fma(a, b, c);
}

// By the reciprocal and its rounding remainder: one division per row.
template <class Scalar>
void divide_rows(const Rows<Scalar>& rows, const Scalar* divisor) {
  for (int64_t r = 0; r < rows.num_rows; ++r) {
    Scalar* __restrict row = rows.data + r * rows.stride;
    const Scalar factor = 1 / divisor[r];
    const Scalar rest = fused(-divisor[r], factor, Scalar(1)) * factor;
    for (int64_t w = 0; w < rows.width; ++w) row[w] = row[w] * factor + row[w] * rest;
  }
}

// 16 x 16 blocks through a local array, so that both sides access whole cache lines.
constexpr int64_t kSquare = 16;

template <class Scalar>
void transpose_square(const Scalar* __restrict in, int64_t stride, Scalar factor, Scalar* __restrict out,
                      int64_t out_stride) {
  alignas(64) Scalar square[kSquare][kSquare];
  for (int64_t r = 0; r < kSquare; ++r) {
    for (int64_t w = 0; w < kSquare; ++w) square[r][w] = in[r * stride + w] * factor;
  }
  for (int64_t w = 0; w < kSquare; ++w) {
    for (int64_t r = 0; r < kSquare; ++r) out[w * out_stride + r] = square[r][w];
  }
}

template <class Scalar>
void transpose(const Rows<const Scalar>& in, Scalar factor, Scalar* out, int64_t out_stride) {
  const int64_t whole_rows = in.num_rows / kSquare * kSquare;
  const int64_t whole_width = in.width / kSquare * kSquare;
  for (int64_t r = 0; r < whole_rows; r += kSquare) {
    for (int64_t w = 0; w < whole_width; w += kSquare) {
      transpose_square(in.data + r * in.stride + w, in.stride, factor, out + w * out_stride + r, out_stride);
    }
  }
  for (int64_t r = 0; r < in.num_rows; ++r) {
    for (int64_t w = r < whole_rows ? whole_width : 0; w < in.width; ++w) {
      out[w * out_stride + r] = in.data[r * in.stride + w] * factor;
    }
  }
}

template <class Scalar>
void add_rows(const Rows<const Scalar>& from, const Rows<Scalar>& to) {
  for (int64_t r = 0; r < from.num_rows; ++r) {
    const Scalar* __restrict in = from.data + r * from.stride;
    Scalar* __restrict out = to.data + r * to.stride;
    for (int64_t w = 0; w < from.width; ++w) out[w] += in[w];
  }
}

// Sixteen partial sums, independent of the vector width.
template <class Scalar>
void dot_rows(const Rows<const Scalar>& a, const Rows<const Scalar>& b, Scalar* out) {
  for (int64_t row = 0; row < a.num_rows; ++row) {
    const Scalar* __restrict x = a.data + row * a.stride;
    const Scalar* __restrict y = b.data + row * b.stride;
    Scalar lanes[kSquare] = {};
    int64_t w = 0;
    for (; w + kSquare <= a.width; w += kSquare) {
      for (int64_t lane = 0; lane < kSquare; ++lane) lanes[lane] += x[w + lane] * y[w + lane];
    }
    Scalar sum = 0;
    for (; w < a.width; ++w) sum += x[w] * y[w];
    for (int64_t lane = 0; lane < kSquare; ++lane) sum += lanes[lane];
    out[row] = sum;
  }
}

template <class Scalar>
bool all_finite(const Scalar* values, int64_t count) {
  using Bits = std::conditional_t<sizeof(Scalar) == 4, uint32_t, uint64_t>;
  const Bits exponent = __builtin_bit_cast(Bits, kInfinity<Scalar>);
  Bits found = 0;
  for (int64_t i = 0; i < count; ++i) {
    found |= (__builtin_bit_cast(Bits, values[i]) & exponent) == exponent ? Bits(1) : Bits(0);
  }
  return found == 0;
}

void upcast_rows(const Rows<const BFloat16>& from, float* to) {
  for (int64_t r = 0; r < from.num_rows; ++r) {
    const BFloat16* __restrict in = from.data + r * from.stride;
    float* __restrict out = to + r * from.width;
    for (int64_t w = 0; w < from.width; ++w) out[w] = upcast(in[w]);
  }
}

void narrow(const float* __restrict from, BFloat16* __restrict to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = narrowed<BFloat16>(from[i]);
}

}  // namespace

template <class Scalar>
const TileMath<Scalar>& tile_math() {
  static constexpr TileMath<Scalar> kMath{
      &cap_scores<Scalar>, &softmax_step<Scalar>, &differentiate<Scalar>, &differentiate_capped<Scalar>,
      &copy_rows<Scalar>,  &scale_rows<Scalar>,   &divide_rows<Scalar>,   &transpose<Scalar>,
      &add_rows<Scalar>,   &dot_rows<Scalar>,     &all_finite<Scalar>};
  return kMath;
}

template const TileMath<float>& tile_math<float>();
template const TileMath<double>& tile_math<double>();

const BFloat16Math& bfloat16_math() {
  static constexpr BFloat16Math kMath{&upcast_rows, &narrow};
  return kMath;
}

}  // namespace espalier::ESPALIER_CPU_NAMESPACE
