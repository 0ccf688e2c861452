// SPDX-License-Identifier: Apache-2.0
// The matrix products of an attention tile, by BLAS or by our own panels.
//
// There are three: scores of keys and the tile's rows, sums over keys for each row (P V, dS K), and sums over
// rows for each key (dS^T Q, P^T dO). Weights are key-major like scores. Both classes have the same
// interface, on floats (doubles). The class for pairs of bfloat16 rounds its operands: queries, keys, values
// and output gradients are bfloat16 already; P and dS are rounded, as in other flash attentions.
#pragma once

#include <algorithm>
#include <type_traits>

#include "espalier/ops/kernels/cpu/attention/tree_attention_tile.h"
#include "espalier/ops/kernels/cpu/products/panel_math.h"

namespace espalier {

/// Operands of products with one row per tile row.
enum TileOperand { kQueries, kOutputGradients, kNumTileOperands };

/// Parameters of products of tiles.
template <class Scalar>
struct TileProductSettings {
  int64_t stride;  // rows of a tile, rounded up
  int64_t width;   // of keys or values, the larger
  InstructionSet isa;
  Multiply<Scalar> multiply;
};

template <class Scalar_>
class BlasProducts {
 public:
  using Scalar = Scalar_;

  /// Number of scratch scalars for the first `operands` operands.
  static int64_t scratch(int64_t stride, int64_t width, int operands) {
    return operands * stride * round_up(width, kCacheLine);
  }

  BlasProducts(const TileProductSettings<Scalar>& settings, int operands, Scratch<Scalar>& scratch)
      : settings_(settings), math_(tile_math<Scalar>(settings.isa)) {
    for (int i = 0; i < operands; ++i) transposed_[i] = scratch.take(settings.stride * settings.width);
  }

  /// Sets the rows of score(), which multiplies their products with keys by `factor`. No gaps between rows.
  void take_rows(TileOperand operand, const Rows<Scalar>& rows, Scalar factor) {
    math_.transpose({rows.data, rows.stride, rows.num_rows, rows.width}, factor, transposed_[operand],
                    settings_.stride);
  }

  /// Sets the rows of sum_over_rows(), scaled by `factor`. May modify them; they must stay alive. No gaps
  /// between rows.
  void take_summands(TileOperand operand, const Rows<Scalar>& rows, Scalar factor) {
    for (int64_t i = 0; factor != 1 && i < rows.num_rows * rows.width; ++i) rows.data[i] *= factor;
    summands_[operand] = rows.data;
  }

  /// to[key, row] = factor * keys[key] . rows[row], for the rows in the range (whose begin is a multiple of
  /// 16).
  void score(TileOperand operand, const Rows<const Scalar>& keys, RowRange range, Scalar* to) const {
    settings_.multiply({false, keys.num_rows, range.end - range.begin, keys.width, keys.data, keys.stride,
                        transposed_[operand] + range.begin, settings_.stride, to + range.begin,
                        settings_.stride, false});
  }

  /// to[row] += sum over keys of weight[key, row] * keys[key], for the rows of the weights; to: [rows,
  /// width].
  void sum_over_keys(const ScoreTile<Scalar>& weights, const Rows<const Scalar>& keys, Scalar* to) const {
    const int64_t first = weights.rows.begin, d = keys.width;
    settings_.multiply({true, weights.rows.end - first, d, keys.num_rows, weights.scores + first,
                        weights.stride, keys.data, keys.stride, to + first * d, d, true});
  }

  /// to[key] = (add: +=) factor * sum over the weights' rows of weight[key, row] * rows[row].
  void sum_over_rows(TileOperand operand, const ScoreTile<Scalar>& weights, const Rows<Scalar>& to,
                     bool add) const {
    const int64_t first = weights.rows.begin, d = to.width;
    settings_.multiply({false, weights.num_keys, d, weights.rows.end - first, weights.scores + first,
                        weights.stride, summands_[operand] + first * d, d, to.data, to.stride, add});
  }

 private:
  TileProductSettings<Scalar> settings_;
  const TileMath<Scalar>& math_;
  Scalar* transposed_[kNumTileOperands] = {};
  const Scalar* summands_[kNumTileOperands] = {};
};

/// Word: float, or BFloat16Pair, to which operands are rounded.
template <class Word>
class PanelProducts {
 public:
  using Scalar = float;

  static int64_t scratch(int64_t stride, int64_t width, int operands) {
    const Sizes sizes(stride, width);
    return operands * (round_up(sizes.rows, kCacheLine) + round_up(sizes.summands, kCacheLine)) +
           round_up(sizes.left, kCacheLine) + round_up(sizes.right, kCacheLine);
  }

  PanelProducts(const TileProductSettings<float>& settings, int operands, Scratch<float>& scratch)
      : stride_(settings.stride), math_(panel_math<Word>(settings.isa)) {
    const Sizes sizes(stride_, settings.width);
    const auto take = [&](int64_t words) { return reinterpret_cast<Word*>(scratch.take(words)); };
    for (int i = 0; i < operands; ++i) {
      operands_[i].rows = take(sizes.rows);
      operands_[i].summands = take(sizes.summands);
    }
    left_ = take(sizes.left);
    right_ = take(sizes.right);
  }

  void take_rows(TileOperand operand, const Rows<float>& rows, float factor) {
    math_.pack({rows.data, rows.stride, 1, rows.num_rows, rows.width}, kRightPanel, operands_[operand].rows);
    operands_[operand].score_factor = factor;
  }

  void take_summands(TileOperand operand, const Rows<float>& rows, float factor) {
    math_.pack({rows.data, 1, rows.stride, rows.width, rows.num_rows}, kRightPanel,
               operands_[operand].summands);
    operands_[operand].summand_words = num_words<Word>(rows.num_rows);
    operands_[operand].summand_factor = factor;
  }

  void score(TileOperand operand, const Rows<const float>& keys, RowRange range, float* to) const {
    const int64_t words = num_words<Word>(keys.width);
    math_.pack({keys.data, keys.stride, 1, keys.num_rows, keys.width}, kLeftPanel, left_);
    math_.multiply({keys.num_rows, range.end - range.begin, words, left_, words * kLeftPanel, kLeftPanel,
                    operands_[operand].rows + range.begin * words, words * kRightPanel, to + range.begin,
                    stride_, false, operands_[operand].score_factor});
  }

  void sum_over_keys(const ScoreTile<float>& weights, const Rows<const float>& keys, float* to) const {
    const int64_t first = weights.rows.begin, rows = weights.rows.end - first;
    const int64_t words = num_words<Word>(keys.num_rows);
    const float* scores = weights.scores + first;
    math_.pack({keys.data, 1, keys.stride, keys.width, keys.num_rows}, kRightPanel, right_);
    PanelProduct<Word> product{rows,
                               keys.width,
                               words,
                               left_,
                               words * kLeftPanel,
                               kLeftPanel,
                               right_,
                               words * kRightPanel,
                               to + first * keys.width,
                               keys.width,
                               true,
                               1};
    if constexpr (std::is_same_v<Word, float>) {
      // Scores have the layout of panels, except for the stride.
      product.a = scores;
      product.a_panel_stride = kLeftPanel;
      product.a_word_stride = weights.stride;
    } else {
      math_.pack({scores, 1, weights.stride, rows, keys.num_rows}, kLeftPanel, left_);
    }
    math_.multiply(product);
  }

  void sum_over_rows(TileOperand operand, const ScoreTile<float>& weights, const Rows<float>& to,
                     bool add) const {
    const int64_t first = weights.rows.begin, rows = weights.rows.end - first;
    const int64_t words = num_words<Word>(rows);
    math_.pack({weights.scores + first, weights.stride, 1, weights.num_keys, rows}, kLeftPanel, left_);
    math_.multiply({weights.num_keys, to.width, words, left_, words * kLeftPanel, kLeftPanel,
                    operands_[operand].summands + num_words<Word>(first) * kRightPanel,
                    operands_[operand].summand_words * kRightPanel, to.data, to.stride, add,
                    operands_[operand].summand_factor});
  }

 private:
  // Sizes of the parts of the scratch, in words.
  struct Sizes {
    int64_t rows, summands, left, right;

    Sizes(int64_t stride, int64_t width) {
      const int64_t words = num_words<Word>(width), keys = num_words<Word>(kMaxChunkKeys);
      rows = packed_words(stride, words, kRightPanel);
      summands = packed_words(width, num_words<Word>(stride), kRightPanel);
      left = std::max({packed_words(kMaxChunkKeys, words, kLeftPanel), packed_words(stride, keys, kLeftPanel),
                       packed_words(kMaxChunkKeys, num_words<Word>(stride), kLeftPanel)});
      right = packed_words(width, keys, kRightPanel);
    }
  };

  struct Operand {
    Word* rows;
    Word* summands;
    int64_t summand_words;
    float score_factor, summand_factor;
  };

  int64_t stride_;
  const PanelMath<Word>& math_;
  Operand operands_[kNumTileOperands] = {};
  Word* left_;
  Word* right_;
};

/// Calls function.operator()<Products>() with the product class.
template <class Element, class Function>
auto with_tile_products(TileProducts products, const Function& function) {
  if constexpr (!std::is_same_v<Element, double>) {
    if (products == TileProducts::kPanels) return function.template operator()<PanelProducts<float>>();
    if (products == TileProducts::kPairPanels)
      return function.template operator()<PanelProducts<BFloat16Pair>>();
  }
  return function.template operator()<BlasProducts<AccumulatorOf<Element>>>();
}

}  // namespace espalier
