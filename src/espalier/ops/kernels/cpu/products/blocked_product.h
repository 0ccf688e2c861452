// SPDX-License-Identifier: Apache-2.0
// Products of large matrices in memory, block by block, by the panels of panel_math.h.
#pragma once

#include <cstdint>

#include "espalier/ops/kernels/cpu/products/panel_math.h"

namespace espalier {

/// The packed word type of an element type.
template <class Element>
using WordOf = std::conditional_t<std::is_same_v<Element, BFloat16>, BFloat16Pair, float>;

/// The result of a product, with row stride `stride`: float, or BFloat16 rounded once from float sums.
template <class Element>
struct ProductResult {
  Element* data;
  int64_t stride;
};

/// C = A B, C = A B + bias, or C += A B for float results. Element is float or BFloat16.
///   The right operand is packed by tasks [0, num_pack_tasks()); when all are done, tasks [0, num_tasks())
///   multiply disjoint parts of C. Any thread may run any task, with its own scratch. Results do not depend
///   on the number of tasks: sums over k are split in a way that depends only on k.
template <class Element>
class BlockedProduct {
  using Word = WordOf<Element>;

 public:
  /// a: the m rows of A; b: the n columns of B; both of length k. `threads`: the number of threads to
  /// partition for.
  BlockedProduct(const Vectors<Element>& a, const Vectors<Element>& b, InstructionSet isa, int64_t threads);

  int64_t num_pack_tasks() const;
  int64_t packed_words() const;               // of the right operand
  int64_t scratch_words(bool rounded) const;  // per thread, for BFloat16 or float results
  int64_t num_tasks() const { return num_strips_ * num_groups_; }

  void pack(int64_t task, Word* packed) const;

  /// Writes to `c`, or adds if `add`. bias: [n], or null.
  void multiply(int64_t task, const Word* packed, Word* scratch, const ProductResult<float>& c, bool add,
                const Element* bias) const;
  void multiply(int64_t task, const Word* packed, Word* scratch, const ProductResult<BFloat16>& c,
                const Element* bias) const;

 private:
  struct Part {
    int64_t row_begin, row_end, column_begin, column_end;
    int64_t rows() const { return row_end - row_begin; }
  };
  Part part_of(int64_t task) const;
  void multiply_block(const Part& part, const Word* strip, const Word* packed, float* c, int64_t stride,
                      bool add) const;

  Vectors<Element> a_, b_;
  const PanelMath<Word>& math_;
  InstructionSet isa_;
  int64_t words_, block_words_;  // of k, and of a block of k
  int64_t strip_rows_, num_strips_;
  int64_t group_columns_, num_groups_;
};

}  // namespace espalier
