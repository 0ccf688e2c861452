// SPDX-License-Identifier: Apache-2.0
// The loops of PanelMath, compiled for the instruction set of the including file, which defines
// ESPALIER_CPU_NAMESPACE. Must not call inline functions of headers other than isa_math.h: the linker would
// merge their copies for different instruction sets.
//   The innermost loop keeps a tile of C in registers and adds outer products of a column of A and a row of
//   B. With 32 vector registers the tile is 12 rows by two vectors: 24 independent sums hide the instruction
//   latency, and 14 loads feed 24 FMAs. Accumulator: float.
#pragma once

#include <cstdint>
#include <type_traits>

#ifdef __AVX512BW__
#include <immintrin.h>
#endif

#include "espalier/ops/kernels/cpu/isa_math.h"
#include "espalier/ops/kernels/cpu/products/panel_math.h"

namespace espalier::ESPALIER_CPU_NAMESPACE {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
constexpr int64_t kTileColumns = 32;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8;
constexpr int64_t kTileColumns = 16;
#else
constexpr int64_t kLanes = 4;
constexpr int64_t kTileColumns = 16;
#endif
constexpr int64_t kSquare = 16;             // words packed at once
constexpr bool kLargeTiles = kLanes == 16;  // else four rows, for 16 registers

using FloatVector = float __attribute__((vector_size(4 * kLanes)));
using WordVector = uint32_t __attribute__((vector_size(4 * kLanes)));

template <class Vector>
inline Vector load_vector(const void* from) {
  Vector vector;
  __builtin_memcpy(&vector, from, sizeof(Vector));
  return vector;
}

// The first `count` elements of Element, at most a vector of them; zeros for the others.
template <class Vector, class Element>
inline Vector load_some(const Element* from, int64_t count) {
  static_assert(sizeof(Vector) == 4 * kSquare || sizeof(Vector) == 2 * kSquare);
#ifdef __AVX512BW__
  const auto present = static_cast<__mmask16>((1u << count) - 1);
  if constexpr (sizeof(Element) == 4) {
    return __builtin_bit_cast(Vector, _mm512_maskz_loadu_ps(present, from));
  } else {
    return __builtin_bit_cast(Vector, _mm256_maskz_loadu_epi16(present, from));
  }
#else
  Element buffer[kSquare] = {};
  for (int64_t i = 0; i < count; ++i) buffer[i] = from[i];
  return load_vector<Vector>(buffer);
#endif
}

template <class Vector>
inline void store_vector(const Vector& vector, void* to) {
  __builtin_memcpy(to, &vector, sizeof(Vector));
}

// sum + a b for a word of A and a vector of words of B.
inline FloatVector multiply_add(float, uint32_t a, const WordVector& b, const FloatVector& sum) {
  return sum + __builtin_bit_cast(float, a) * __builtin_bit_cast(FloatVector, b);
}

inline FloatVector multiply_add(BFloat16Pair, uint32_t a, const WordVector& b, const FloatVector& sum) {
#ifdef __AVX512BF16__
  const __m512i pair = _mm512_set1_epi32(static_cast<int>(a));
  return (FloatVector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pair, (__m512bh)b);
#else
  constexpr uint32_t kUpper = 0xffff0000u;
  const auto part = [](uint32_t bits) { return __builtin_bit_cast(float, bits); };
  const auto parts = [](const WordVector& bits) { return __builtin_bit_cast(FloatVector, bits); };
  return (sum + part(a & kUpper) * parts(b & kUpper)) + part(a << 16) * parts(b << 16);
#endif
}

// Columns [0, kColumns) of kRows rows of one panel of A; C is written completely.
template <class Word, int kRows, int kColumns>
void multiply_tile(const PanelProduct<Word>& p, const Word* __restrict a, const Word* __restrict b,
                   float* __restrict c, int64_t ldc, bool add) {
  constexpr int kVectors = kColumns / kLanes;
  constexpr int kVectorsOfPanel = kRightPanel / kLanes;
  FloatVector sums[kRows][kVectors] = {};
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kColumns; j += 16) __builtin_prefetch(c + r * ldc + j, 1);
  }
  for (int64_t w = 0; w < p.words; ++w) {
    WordVector row[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      row[v] =
          load_vector<WordVector>(b + v / kVectorsOfPanel * p.b_panel_stride + v % kVectorsOfPanel * kLanes);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const auto factor = __builtin_bit_cast(uint32_t, a[r]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add(Word{}, factor, row[v], sums[r][v]);
    }
    a += p.a_word_stride;
    b += kRightPanel;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      float* place = c + r * ldc + v * kLanes;
      const FloatVector sum = sums[r][v] * p.factor;
      store_vector(add ? load_vector<FloatVector>(place) + sum : sum, place);
    }
  }
}

// The same for the first `rows` rows and `columns` columns.
template <class Word, int kRows, int kColumns>
void multiply_part(const PanelProduct<Word>& p, const Word* a, const Word* b, float* c, int64_t rows,
                   int64_t columns) {
  if (rows == kRows && columns == kColumns) {
    multiply_tile<Word, kRows, kColumns>(p, a, b, c, p.ldc, p.add);
    return;
  }
  float part[kRows * kColumns];
  multiply_tile<Word, kRows, kColumns>(p, a, b, part, kColumns, false);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < columns; ++j) {
      float& place = c[r * p.ldc + j];
      place = p.add ? place + part[r * kColumns + j] : part[r * kColumns + j];
    }
  }
}

template <class Word, int kColumns>
void multiply_columns(const PanelProduct<Word>& p, const Word* b, float* c, int64_t columns) {
  const Word* a = p.a;
  for (int64_t row = 0; row < p.m; row += kLeftPanel, a += p.a_panel_stride) {
    float* place = c + row * p.ldc;
    const int64_t rows = p.m - row < kLeftPanel ? p.m - row : kLeftPanel;
    if constexpr (kLargeTiles) {
      if (rows > 8) {
        multiply_part<Word, 12, kColumns>(p, a, b, place, rows, columns);
      } else if (rows > 4) {
        multiply_part<Word, 8, kColumns>(p, a, b, place, rows, columns);
      } else {
        multiply_part<Word, 4, kColumns>(p, a, b, place, rows, columns);
      }
    } else {
      for (int64_t r = 0; r < rows; r += 4) {
        multiply_part<Word, 4, kColumns>(p, a + r, b, place + r * p.ldc, rows - r < 4 ? rows - r : 4,
                                         columns);
      }
    }
  }
}

// Column by column of C, so that panels of B stay in the L1 cache.
template <class Word>
void multiply(const PanelProduct<Word>& p) {
  for (int64_t column = 0; column < p.n; column += kTileColumns) {
    const Word* b = p.b + column / kRightPanel * p.b_panel_stride;
    const int64_t columns = p.n - column < kTileColumns ? p.n - column : kTileColumns;
    if (columns > kRightPanel) {
      multiply_columns<Word, kTileColumns>(p, b, p.c + column, columns);
    } else {
      multiply_columns<Word, kRightPanel>(p, b, p.c + column, columns);
    }
  }
}

// ---- Packing ----

using SquareRow = uint32_t __attribute__((vector_size(4 * kSquare)));
using FloatRow = float __attribute__((vector_size(4 * kSquare)));
using HalfRow = uint16_t __attribute__((vector_size(2 * kSquare)));

// Rounds to bfloat16, to nearest even, in the upper half.
inline SquareRow rounded(const FloatRow& values) {
  const auto bits = __builtin_bit_cast(SquareRow, values);
  const SquareRow nearest = bits + 0x7fffu + ((bits >> 16) & 1u);
  return ((values == values) ? nearest : SquareRow{} + 0x7fc00000u) & 0xffff0000u;
}

// Words [w, w + 16) of one vector, whose elements are adjacent.
inline SquareRow words_at(float, const float* from) {
  return load_vector<SquareRow>(from);
}

inline SquareRow words_at(BFloat16Pair, const BFloat16* from) {
  return load_vector<SquareRow>(from);  // the lower half of a word is the first
}

inline SquareRow words_at(BFloat16Pair, const float* from) {
#ifdef __AVX512BF16__
  return (SquareRow)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + kSquare), _mm512_loadu_ps(from));
#else
  SquareRow words;
  for (int64_t i = 0; i < kSquare; ++i) {
    words[i] = static_cast<uint32_t>(narrowed<BFloat16>(from[2 * i]).bits) |
               static_cast<uint32_t>(narrowed<BFloat16>(from[2 * i + 1]).bits) << 16;
  }
  return words;
#endif
}

inline SquareRow words_at(float, const BFloat16* from) {
  return __builtin_convertvector(load_vector<HalfRow>(from), SquareRow) << 16;
}

// Words of adjacent vectors at one index of k: from one row of elements, or two for pairs.
inline SquareRow joined(float, const FloatRow& first, const FloatRow&) {
  return __builtin_bit_cast(SquareRow, first);
}

inline SquareRow joined(float, const HalfRow& first, const HalfRow&) {
  return __builtin_convertvector(first, SquareRow) << 16;
}

inline SquareRow joined(BFloat16Pair, const HalfRow& first, const HalfRow& second) {
  return __builtin_convertvector(first, SquareRow) | __builtin_convertvector(second, SquareRow) << 16;
}

inline SquareRow joined(BFloat16Pair, const FloatRow& first, const FloatRow& second) {
#ifdef __AVX512BF16__
  using Halves = uint16_t __attribute__((vector_size(4 * kSquare)));
  const auto halves = (Halves)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  return (SquareRow)__builtin_shufflevector(halves, halves, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22,
                                            7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                            31);
#else
  return rounded(first) >> 16 | rounded(second);
#endif
}

#define ESPALIER_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)

// Transposes in four steps of pairwise exchanges.
inline void transpose_square(SquareRow (&rows)[kSquare]) {
  SquareRow other[kSquare];
  for (int i = 0; i < kSquare; i += 2) {
    other[i] =
        ESPALIER_SHUFFLE(rows[i], rows[i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
    other[i + 1] =
        ESPALIER_SHUFFLE(rows[i], rows[i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  }
  for (int i = 0; i < kSquare; i += 4) {
    for (int j = i; j < i + 2; ++j) {
      rows[j] =
          ESPALIER_SHUFFLE(other[j], other[j + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
      rows[j + 2] = ESPALIER_SHUFFLE(other[j], other[j + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14,
                                     15, 30, 31);
    }
  }
  for (int i = 0; i < kSquare; i += 8) {
    for (int j = i; j < i + 4; ++j) {
      other[j] =
          ESPALIER_SHUFFLE(rows[j], rows[j + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
      other[j + 4] =
          ESPALIER_SHUFFLE(rows[j], rows[j + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
  }
  for (int j = 0; j < 8; ++j) {
    rows[j] =
        ESPALIER_SHUFFLE(other[j], other[j + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    rows[j + 8] = ESPALIER_SHUFFLE(other[j], other[j + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28,
                                   29, 30, 31);
  }
}

#undef ESPALIER_SHUFFLE

template <int64_t kWidth>
inline void store_words(const SquareRow& words, void* to) {
#ifdef __AVX512BW__
  _mm512_mask_storeu_epi32(to, static_cast<__mmask16>((1u << kWidth) - 1), (__m512i)words);
#else
  __builtin_memcpy(to, &words, 4 * kWidth);
#endif
}

// The first `count` elements, padded with zeros.
template <class Element, int64_t kMost>
inline const Element* padded(const Element* from, int64_t stride, int64_t count, Element (&buffer)[kMost]) {
  for (int64_t i = 0; i < kMost; ++i) buffer[i] = i < count ? from[i * stride] : Element{};
  return buffer;
}

// Vectors with adjacent elements: squares of 16 vectors by 16 words are transposed.
template <class Word, class Element, int64_t kWidth>
void pack_transposed(const Vectors<Element>& from, int64_t first, Word* to) {
  constexpr int64_t kElements = kSquare * kElementsOfWord<Word>;
  const int64_t count = from.count - first < kWidth ? from.count - first : kWidth;
  const int64_t words = (from.length + kElementsOfWord<Word> - 1) / kElementsOfWord<Word>;
  Element buffer[kElements];
  for (int64_t word = 0; word < words; word += kSquare) {
    const int64_t place = word * kElementsOfWord<Word>, left = from.length - place;
    SquareRow square[kSquare];
    for (int64_t i = 0; i < kSquare; ++i) {
      const Element* elements = from.data + (first + i) * from.vector_stride + place;
      square[i] = i >= count ? SquareRow{}
                  : left >= kElements
                      ? words_at(Word{}, elements)
                      : words_at(Word{}, padded<Element, kElements>(elements, 1, left, buffer));
    }
    transpose_square(square);
    const int64_t present = words - word < kSquare ? words - word : kSquare;
    for (int64_t w = 0; w < present; ++w) store_words<kWidth>(square[w], to + (word + w) * kWidth);
  }
}

// Elements of up to kWidth vectors at one index of k; zeros beyond its end.
template <class Element, int64_t kWidth>
inline auto elements_at(const Vectors<Element>& from, int64_t first, int64_t place) {
  using Row = std::conditional_t<sizeof(Element) == 4, FloatRow, HalfRow>;
  if (place >= from.length) return Row{};
  const int64_t count = from.count - first < kWidth ? from.count - first : kWidth;
  const Element* elements = from.data + first * from.vector_stride + place * from.element_stride;
  if (from.vector_stride == 1) return load_some<Row>(elements, count);
  Element buffer[kSquare];
  return load_vector<Row>(padded<Element, kSquare>(elements, from.vector_stride, count, buffer));
}

// Vectors adjacent in memory.
template <class Word, class Element, int64_t kWidth>
void pack_adjacent(const Vectors<Element>& from, int64_t first, Word* to) {
  constexpr int64_t kElements = kElementsOfWord<Word>;
  const int64_t words = (from.length + kElements - 1) / kElements;
  for (int64_t w = 0; w < words; ++w) {
    const auto even = elements_at<Element, kWidth>(from, first, w * kElements);
    const auto odd = kElements == 1 ? even : elements_at<Element, kWidth>(from, first, w * kElements + 1);
    store_words<kWidth>(joined(Word{}, even, odd), to + w * kWidth);
  }
}

template <class Word, class Element, int64_t kWidth>
void pack_panels(const Vectors<Element>& from, Word* to) {
  const int64_t words = (from.length + kElementsOfWord<Word> - 1) / kElementsOfWord<Word>;
  for (int64_t first = 0; first < from.count; first += kWidth, to += words * kWidth) {
    if (from.element_stride == 1) {
      pack_transposed<Word, Element, kWidth>(from, first, to);
    } else {
      pack_adjacent<Word, Element, kWidth>(from, first, to);
    }
  }
}

template <class Word, class Element>
void pack(const Vectors<Element>& from, int64_t width, Word* to) {
  if (width == kLeftPanel) {
    pack_panels<Word, Element, kLeftPanel>(from, to);
  } else {
    pack_panels<Word, Element, kRightPanel>(from, to);
  }
}

}  // namespace

template <class Word>
const PanelMath<Word>& panel_math() {
  static constexpr PanelMath<Word> kMath{&pack<Word, float>, &pack<Word, BFloat16>, &multiply<Word>};
  return kMath;
}

template const PanelMath<float>& panel_math<float>();
template const PanelMath<BFloat16Pair>& panel_math<BFloat16Pair>();

}  // namespace espalier::ESPALIER_CPU_NAMESPACE
