// SPDX-License-Identifier: Apache-2.0
// Matrix products from operands that have been packed into panels, summed in float32; compiled once for each
// InstructionSet.
//
// Panels have the order in which the innermost loop reads them. Their elements are words of four bytes, what
// one lane of a vector takes at a time: a float, or a pair of bfloat16 that are neighbours along the sum,
// which the instructions for bfloat16 multiply and add together. Every result is one sum from the first word
// to the last: its bits do not depend on its place, nor on how many rows or columns are computed with it.
#pragma once

#include <cstdint>

#include "espalier/ops/kernels/cpu/isa_dispatch.h"
#include "espalier/ops/kernels/element.h"

namespace espalier {

/// Two neighbours along the sum, the first in the lower half; after an odd last one there is a zero.
struct BFloat16Pair {
  uint32_t bits;
};

/// In which words elements are packed, and how many of them a word has.
template <class Word>
constexpr int64_t kElementsOfWord = 1;
template <>
inline constexpr int64_t kElementsOfWord<BFloat16Pair> = 2;

/// Words of `count` elements that follow each other along the sum.
template <class Word>
constexpr int64_t num_words(int64_t count) {
  return (count + kElementsOfWord<Word> - 1) / kElementsOfWord<Word>;
}

/// Rows in a panel of the left operand, and columns in one of the right.
constexpr int64_t kLeftPanel = 12, kRightPanel = 16;

/// Words that `count` rows or columns take as panels of `width`.
constexpr int64_t packed_words(int64_t count, int64_t words, int64_t width) {
  return (count + width - 1) / width * width * words;
}

/// Rows of a left operand or columns of a right one: vectors along the sum. One of the strides, in elements,
/// is 1 (or there is one vector or element).
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

/// Operands are read up to the end of a group of four rows or 16 columns that m or n cuts, whatever is there.
template <class Word>
struct PanelMath {
  /// Packs vectors into panels of `width` (kLeftPanel or kRightPanel), which are num_words(length) * width
  /// words apart; panels are filled up with zeros.
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
