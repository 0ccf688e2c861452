// SPDX-License-Identifier: Apache-2.0
// Products of small matrices in cache, compiled for the instruction set of the including file, which defines
// ESPALIER_CPU_NAMESPACE. Every result is a single sum from the first term to the last, independent of tiles.
#pragma once

#include <cstdint>

namespace espalier::ESPALIER_CPU_NAMESPACE {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kVectorBytes = 64;
constexpr int kTileRows = 8;  // by two vectors: 16 sums, 2 vectors of B, factors from memory
#elif defined(__AVX2__)
constexpr int64_t kVectorBytes = 32;
constexpr int kTileRows = 6;
#else
constexpr int64_t kVectorBytes = 16;
constexpr int kTileRows = 4;
#endif

template <class Scalar>
struct VectorOf;
template <>
struct VectorOf<float> {
  using Type = float __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VectorOf<double> {
  using Type = double __attribute__((vector_size(kVectorBytes)));
};

/// C = A B + factor * from. Rows of B, C and `from` are accessed in whole vectors.
template <class Scalar>
struct SmallProduct {
  int64_t rows, columns, terms;
  const Scalar* a;  // element (i, t) at a[i * a_row + t * a_term]
  int64_t a_row, a_term;
  const Scalar* b;  // [terms, columns]
  int64_t b_stride;
  Scalar* c;  // [rows, columns]
  int64_t c_stride;
  const Scalar* from = nullptr;  // with the stride of c, may be c; null: zeros
  Scalar factor = 1;
};

template <class Scalar, int kRows, int kVectors>
void multiply_tile(const SmallProduct<Scalar>& p, int64_t row, int64_t column) {
  using Vector = typename VectorOf<Scalar>::Type;
  constexpr int64_t kLanes = kVectorBytes / sizeof(Scalar);
  Vector sums[kRows][kVectors] = {};
  const Scalar* __restrict a = p.a + row * p.a_row;
  const Scalar* __restrict b = p.b + column;
  for (int64_t t = 0; t < p.terms; ++t) {
    Vector b_vectors[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) __builtin_memcpy(&b_vectors[v], b + v * kLanes, sizeof(Vector));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Scalar factor = a[r * p.a_row];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[r][v] += factor * b_vectors[v];
    }
    a += p.a_term;
    b += p.b_stride;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const int64_t place = (row + r) * p.c_stride + column;
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      Vector sum = sums[r][v];
      if (p.from != nullptr) {
        Vector before;
        __builtin_memcpy(&before, p.from + place + v * kLanes, sizeof(Vector));
        sum += p.factor * before;
      }
      __builtin_memcpy(p.c + place + v * kLanes, &sum, sizeof(Vector));
    }
  }
}

/// The last `rows` rows, fewer than a tile.
template <class Scalar, int kRows, int kVectors>
void multiply_last_rows(const SmallProduct<Scalar>& p, int64_t row, int64_t column) {
  if constexpr (kRows > 0) {
    if (p.rows - row == kRows) return multiply_tile<Scalar, kRows, kVectors>(p, row, column);
    multiply_last_rows<Scalar, kRows - 1, kVectors>(p, row, column);
  }
}

template <class Scalar, int kVectors>
void multiply_strip(const SmallProduct<Scalar>& p, int64_t column) {
  int64_t row = 0;
  for (; row + kTileRows <= p.rows; row += kTileRows)
    multiply_tile<Scalar, kTileRows, kVectors>(p, row, column);
  multiply_last_rows<Scalar, kTileRows - 1, kVectors>(p, row, column);
}

template <class Scalar>
void multiply(const SmallProduct<Scalar>& p) {
  constexpr int64_t kLanes = kVectorBytes / sizeof(Scalar);
  int64_t column = 0;
  for (; column + kLanes < p.columns; column += 2 * kLanes) multiply_strip<Scalar, 2>(p, column);
  if (column < p.columns) multiply_strip<Scalar, 1>(p, column);
}

}  // namespace
}  // namespace espalier::ESPALIER_CPU_NAMESPACE
