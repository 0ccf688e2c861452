// SPDX-License-Identifier: Apache-2.0
// The elementwise part of attention on the CPU, compiled once per InstructionSet.
#pragma once

#include <cstdint>

#include "espalier/ops/kernels/cpu/isa_dispatch.h"
#include "espalier/ops/kernels/element.h"

namespace espalier {

/// Rows [begin, end) of a tile.
struct RowRange {
  int32_t begin;
  int32_t end;
};

/// Scores are processed for kKeysAtOnce keys at a time: buffers must be padded to a multiple of it, and the
/// padding is overwritten.
constexpr int32_t kKeysAtOnce = 8;

/// Scores of a tile, key-major: that of key c and row r is scores[c * stride + r]. Only `rows` are processed,
/// a range that contains visible[c], the rows that see key c, for all c.
template <class Scalar>
struct ScoreTile {
  Scalar* scores;
  int64_t stride;
  int32_t num_keys;
  RowRange rows;
  const RowRange* visible;
};

/// The state of an online softmax over several tiles, for each row; scores are to base 2.
template <class Scalar>
struct SoftmaxState {
  Scalar* maximum;     // running maximum of the scores; initially -infinity
  Scalar* sum;         // of 2^(score - maximum); initially 0
  Scalar* correction;  // out: 2^(maximum before - maximum after)
};

/// Inputs of the backward pass for each row, and the tile of dO . V, which becomes the tile of dS.
template <class Scalar>
struct ScoreGradient {
  Scalar* tile;
  const Scalar* lse2;       // log2 of the sum of 2^score over all keys, rounded
  const Scalar* lse2_rest;  // remainder of the rounding, whose error would scale the gradients
  const Scalar* delta;      // sum of dO * O
};

/// A matrix of `num_rows` rows of `width` adjacent elements, `stride` elements from row to row.
template <class Element>
struct Rows {
  Element* data;
  int64_t stride;
  int64_t num_rows;
  int64_t width;
};

/// Scalar, float or double, is the accumulator type.
template <class Scalar>
struct TileMath {
  /// Scores s of visible pairs become cap * tanh(s / cap).
  void (*cap_scores)(const ScoreTile<Scalar>&, Scalar cap);
  /// One step of the online softmax: scores become 2^(score - maximum), 0 where not visible. Rows without a
  /// visible key keep maximum -infinity and get correction 0.
  void (*softmax_step)(const ScoreTile<Scalar>&, const SoftmaxState<Scalar>&);
  /// Scores become p = 2^(score - lse2), and the other tile p * (tile - delta); 0 where not
  /// visible.
  void (*differentiate)(const ScoreTile<Scalar>&, const ScoreGradient<Scalar>&);
  /// The same for scores before cap_scores: the other tile is multiplied by the derivative of the cap, too.
  void (*differentiate_capped)(const ScoreTile<Scalar>&, const ScoreGradient<Scalar>&, Scalar cap);
  /// Copies rows to `to` [num_rows, width].
  void (*copy_rows)(const Rows<const Scalar>& from, Scalar* to);
  /// row r *= factor[r].
  void (*scale_rows)(const Rows<Scalar>&, const Scalar* factor);
  /// row r /= divisor[r], with about one rounding, since an error common to a row does not average out.
  void (*divide_rows)(const Rows<Scalar>&, const Scalar* divisor);
  /// out[w * out_stride + r] = factor * rows[r][w].
  void (*transpose)(const Rows<const Scalar>&, Scalar factor, Scalar* out, int64_t out_stride);
  /// Row r of `to` += row r of `from`, for all of from's rows.
  void (*add_rows)(const Rows<const Scalar>& from, const Rows<Scalar>& to);
  /// out[r] = sum over w of a[r][w] * b[r][w].
  void (*dot_rows)(const Rows<const Scalar>& a, const Rows<const Scalar>& b, Scalar* out);
  bool (*all_finite)(const Scalar* values, int64_t count);
};

/// bfloat16 to and from float32, rounding to nearest even.
struct BFloat16Math {
  void (*upcast_rows)(const Rows<const BFloat16>& from, float* to);  // to [num_rows, width]
  void (*narrow)(const float* from, BFloat16* to, int64_t count);
};

ESPALIER_DECLARE_ISAS(template <class Scalar> const TileMath<Scalar>& tile_math())
template <class Scalar>
const TileMath<Scalar>& tile_math(InstructionSet isa) {
  return ESPALIER_OF_ISA(isa, tile_math<Scalar>());
}
ESPALIER_DECLARE_ISAS(const BFloat16Math& bfloat16_math())
inline const BFloat16Math& bfloat16_math(InstructionSet isa) {
  return ESPALIER_OF_ISA(isa, bfloat16_math());
}

}  // namespace espalier
