// SPDX-License-Identifier: Apache-2.0
// Matrix products of operands packed into panels, with float32 accumulators; compiled once per
// InstructionSet.
//
// Panels are in the access order of the innermost loop. Their elements are 4-byte words, one per vector lane:
// a float, or a pair of bfloat16 adjacent in the k dimension, as bfloat16 instructions require. Every result
// is a single sum from the first word to the last, so its bits do not depend on its position or on the other
// rows and columns.
#pragma once

#include <cstdint>

#include "espalier/ops/kernels/cpu/isa_dispatch.h"
#include "espalier/ops/kernels/element.h"

namespace espalier {

/// Two elements adjacent in k, the first in the lower half; padded with zero.
struct BFloat16Pair {
  uint32_t bits;
};

/// The element type of a word, and the number of elements per word.
template <class Word>
constexpr int64_t kElementsOfWord = 1;
template <>
inline constexpr int64_t kElementsOfWord<BFloat16Pair> = 2;

/// Number of words for `count` elements along k.
template <class Word>
constexpr int64_t num_words(int64_t count) {
  return (count + kElementsOfWord<Word> - 1) / kElementsOfWord<Word>;
}

/// Rows per panel of the left operand, columns per panel of the right.
constexpr int64_t kLeftPanel = 12, kRightPanel = 16;

/// Number of words of `count` rows or columns in panels of `width`.
constexpr int64_t packed_words(int64_t count, int64_t words, int64_t width) {
  return (count + width - 1) / width * width * words;
}

/// Rows of a left operand or columns of a right one: vectors along k. One of the strides, in elements, must
/// be 1 (unless there is only one vector or element).
template <class Element>
struct Vectors {
  const Element* data;
  int64_t vector_stride;
  int64_t element_stride;
  int64_t count;
  int64_t length;
};

/// C = factor A B, or C += factor A B: A is [m, 12-row panels of words], B [n, 16-column panels of words].
template <class Word>
struct PanelProduct {
  int64_t m, n, words;
  const Word* a;  // word w of row i: a[i / 12 * a_panel_stride + w * a_word_stride + i % 12]
  int64_t a_panel_stride;
  int64_t a_word_stride;
  const Word* b;  // word w of column j: b[j / 16 * b_panel_stride + w * 16 + j % 16]
  int64_t b_panel_stride;
  float* c;  // [m, n], rows ldc apart
  int64_t ldc;
  bool add;
  float factor = 1;
};

/// Operands are read up to a multiple of 4 rows or 16 columns; the padding may be arbitrary.
template <class Word>
struct PanelMath {
  /// Packs vectors into panels of `width` (kLeftPanel or kRightPanel), which are num_words(length) * width
  /// words apart; panels are padded with zeros.
  void (*pack)(const Vectors<float>&, int64_t width, Word* to);  // rounds to nearest even
  void (*pack_bfloat16)(const Vectors<BFloat16>&, int64_t width, Word* to);
  void (*multiply)(const PanelProduct<Word>&);
};

/// Word is float or BFloat16Pair. Instruction sets below kAvx512Bf16 multiply pairs in float32 instructions.
#ifdef __x86_64__
namespace cpu_avx512_bf16 {
template <class Word>
const PanelMath<Word>& panel_math();
}
#endif
ESPALIER_DECLARE_ISAS(template <class Word> const PanelMath<Word>& panel_math())
template <class Word>
const PanelMath<Word>& panel_math(InstructionSet isa) {
#ifdef __x86_64__
  if (isa >= InstructionSet::kAvx512Bf16) return cpu_avx512_bf16::panel_math<Word>();
#endif
  return ESPALIER_OF_ISA(isa, panel_math<Word>());
}

}  // namespace espalier
