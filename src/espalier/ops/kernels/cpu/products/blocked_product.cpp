// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cpu/products/blocked_product.h"

#include <algorithm>

#include "espalier/ops/kernels/cpu/attention/tile_math.h"

namespace espalier {
namespace {

constexpr int64_t kPackColumns = 8 * kRightPanel;  // of a task
// The working set should fit the L2 cache: a strip of rows, these columns of C, and a block of the k
// dimension.
constexpr int64_t kMinStripRows = 4 * kLeftPanel, kMaxStripRows = 8 * kLeftPanel;
constexpr int64_t kBlockColumns = 256;
constexpr int64_t kMaxBlockWords = 640;

constexpr int64_t ceil_div(int64_t number, int64_t divisor) {
  return (number + divisor - 1) / divisor;
}

template <class Element>
Vectors<Element> slice(const Vectors<Element>& vectors, int64_t begin, int64_t end) {
  return {vectors.data + begin * vectors.vector_stride, vectors.vector_stride, vectors.element_stride,
          end - begin, vectors.length};
}

void pack_vectors(const PanelMath<float>& math, const Vectors<float>& vectors, int64_t width, float* to) {
  math.pack(vectors, width, to);
}

void pack_vectors(const PanelMath<BFloat16Pair>& math, const Vectors<BFloat16>& vectors, int64_t width,
                  BFloat16Pair* to) {
  math.pack_bfloat16(vectors, width, to);
}

void upcast(InstructionSet isa, const float* from, int64_t count, float* to) {
  tile_math<float>(isa).copy_rows({from, count, 1, count}, to);
}

void upcast(InstructionSet isa, const BFloat16* from, int64_t count, float* to) {
  bfloat16_math(isa).upcast_rows({from, count, 1, count}, to);
}

}  // namespace

template <class Element>
BlockedProduct<Element>::BlockedProduct(const Vectors<Element>& a, const Vectors<Element>& b,
                                        InstructionSet isa, int64_t threads)
    : a_(a), b_(b), math_(panel_math<Word>(isa)), isa_(isa), words_(num_words<Word>(a.length)) {
  const int64_t blocks = std::max<int64_t>(ceil_div(words_, kMaxBlockWords), 1);
  block_words_ = std::max<int64_t>(ceil_div(words_, blocks), 1);
  // Several tasks per thread for load balance; each reads all columns of B.
  const int64_t tasks = threads > 1 ? 4 * threads : 1;
  strip_rows_ = std::clamp(ceil_div(a.count, tasks), kMinStripRows, kMaxStripRows);
  strip_rows_ = ceil_div(strip_rows_, kLeftPanel) * kLeftPanel;
  num_strips_ = ceil_div(a.count, strip_rows_);
  const int64_t groups = num_strips_ == 0 ? 1 : ceil_div(tasks, num_strips_);
  group_columns_ =
      std::max<int64_t>(ceil_div(ceil_div(b.count, groups), 4 * kRightPanel) * 4 * kRightPanel, 1);
  num_groups_ = ceil_div(b.count, group_columns_);
}

template <class Element>
int64_t BlockedProduct<Element>::num_pack_tasks() const {
  return ceil_div(b_.count, kPackColumns);
}

template <class Element>
int64_t BlockedProduct<Element>::packed_words() const {
  return espalier::packed_words(b_.count, words_, kRightPanel);
}

template <class Element>
int64_t BlockedProduct<Element>::scratch_words(bool rounded) const {
  const int64_t rows = std::min(strip_rows_, ceil_div(a_.count, kLeftPanel) * kLeftPanel);
  return rows * (words_ + (rounded ? std::min(kBlockColumns, b_.count) : 0));
}

template <class Element>
void BlockedProduct<Element>::pack(int64_t task, Word* packed) const {
  const int64_t begin = task * kPackColumns, end = std::min(begin + kPackColumns, b_.count);
  pack_vectors(math_, slice(b_, begin, end), kRightPanel, packed + begin * words_);
}

template <class Element>
typename BlockedProduct<Element>::Part BlockedProduct<Element>::part_of(int64_t task) const {
  const int64_t row = task / num_groups_ * strip_rows_, column = task % num_groups_ * group_columns_;
  return {row, std::min(row + strip_rows_, a_.count), column, std::min(column + group_columns_, b_.count)};
}

template <class Element>
void BlockedProduct<Element>::multiply_block(const Part& part, const Word* strip, const Word* packed,
                                             float* c, int64_t stride, bool add) const {
  PanelProduct<Word> product{part.rows(),
                             part.column_end - part.column_begin,
                             0,
                             nullptr,
                             words_ * kLeftPanel,
                             kLeftPanel,
                             nullptr,
                             words_ * kRightPanel,
                             c,
                             stride,
                             add};
  for (int64_t word = 0; word < words_ || word == 0; word += block_words_, product.add = true) {
    product.words = std::min(words_ - word, block_words_);
    product.a = strip + word * kLeftPanel;
    product.b = packed + part.column_begin * words_ + word * kRightPanel;
    math_.multiply(product);
  }
}

template <class Element>
void BlockedProduct<Element>::multiply(int64_t task, const Word* packed, Word* scratch,
                                       const ProductResult<float>& c, bool add, const Element* bias) const {
  const Part part = part_of(task);
  pack_vectors(math_, slice(a_, part.row_begin, part.row_end), kLeftPanel, scratch);
  for (int64_t column = part.column_begin; column < part.column_end; column += kBlockColumns) {
    const Part block{part.row_begin, part.row_end, column, std::min(column + kBlockColumns, part.column_end)};
    float* to = c.data + block.row_begin * c.stride + column;
    if (bias != nullptr) {
      for (int64_t r = 0; r < block.rows(); ++r)
        upcast(isa_, bias + column, block.column_end - column, to + r * c.stride);
    }
    multiply_block(block, scratch, packed, to, c.stride, add || bias != nullptr);
  }
}

template <class Element>
void BlockedProduct<Element>::multiply(int64_t task, const Word* packed, Word* scratch,
                                       const ProductResult<BFloat16>& c, const Element* bias) const {
  const Part part = part_of(task);
  pack_vectors(math_, slice(a_, part.row_begin, part.row_end), kLeftPanel, scratch);
  float* sums = reinterpret_cast<float*>(scratch + espalier::packed_words(part.rows(), words_, kLeftPanel));
  for (int64_t column = part.column_begin; column < part.column_end; column += kBlockColumns) {
    const Part block{part.row_begin, part.row_end, column, std::min(column + kBlockColumns, part.column_end)};
    const int64_t width = block.column_end - column;
    if (bias != nullptr) {
      for (int64_t r = 0; r < block.rows(); ++r) upcast(isa_, bias + column, width, sums + r * width);
    }
    multiply_block(block, scratch, packed, sums, width, bias != nullptr);
    for (int64_t r = 0; r < block.rows(); ++r) {
      bfloat16_math(isa_).narrow(sums + r * width, c.data + (block.row_begin + r) * c.stride + column, width);
    }
  }
}

template class BlockedProduct<float>;
template class BlockedProduct<BFloat16>;

}  // namespace espalier
