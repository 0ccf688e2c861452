// SPDX-License-Identifier: Apache-2.0
// Linear recurrences with matrix states inside one chunk of tokens on the CPU, compiled once per
// InstructionSet. Formulas: docs/math.md, "Linear recurrences on trees".
//
// With rows q, k [Dk] and v [Dv] of a token, its decay exp(g), and the state S' [Dk, Dv] of the token before:
//   S = exp(g) S' + k n^T,  out = S^T (scale q),
// where n = v, or with the delta rule n = beta (v - (exp(g) S')^T k). Accumulator: Scalar, but float64 for
// the logarithms of decays. Chunks are independent.
#pragma once

#include <cstdint>

#include "espalier/ops/kernels/cpu/isa_dispatch.h"

namespace espalier {

/// H heads that share q and k, and the strides of their rows.
template <class Scalar>
struct RecurrenceShape {
  bool delta;  // whether to use the delta rule
  Scalar scale;
  int64_t num_heads;                                // H
  int64_t key_dim;                                  // Dk
  int64_t value_dim;                                // Dv
  int64_t chunk_size;                               // maximum tokens per chunk
  int64_t key_stride, value_stride, number_stride;  // token strides; heads of a token are adjacent
  int64_t state_stride;  // row stride of a state: state_stride_of(Dv); the states of heads are adjacent
};

/// Rows of states are zero-padded to whole vectors.
constexpr int64_t state_stride_of(int64_t value_dim) {
  return (value_dim + 15) / 16 * 16;
}

/// The rows of a chunk.
template <class Scalar>
struct RecurrenceRows {
  int64_t size;         // L tokens
  const Scalar *q, *k;  // [L, Dk]
  const Scalar* v;      // [L, H, Dv]
  const Scalar* g;      // [L, H]
  const Scalar* beta;   // [L, H]; unused without the delta rule
};

template <class Scalar>
struct RecurrenceForward {
  RecurrenceRows<Scalar> rows;
  const Scalar* start;  // [H, Dk, Dv]: states before the chunk; null: zeros
  Scalar* end;          // states after it; null: skip; may alias `start`
  Scalar* out;          // [L, H, Dv] with the strides of v; null: skip
  Scalar* news;         // [H, L, state_stride]: n of the delta rule; null: skip
};

template <class Scalar>
struct RecurrenceBackward {
  RecurrenceRows<Scalar> rows;
  const Scalar* start;     // as in the forward pass
  const Scalar* news;      // as written by forward; delta rule only
  const Scalar* grad_out;  // with the strides of v; null: zeros
  const Scalar* grad_end;  // of the states after the chunk; null: zeros
  Scalar* grad_start;      // of the states before it; null: skip; may alias `grad_end`
  bool add_to_start;       // accumulate into grad_start
  Scalar *grad_q, *grad_k, *grad_v, *grad_g,
      *grad_beta;  // with the strides of the inputs; grad_beta only with the delta rule
};

template <class Scalar>
struct RecurrenceMath {
  /// Number of scratch scalars of each function; may be uninitialised.
  int64_t (*scratch)(const RecurrenceShape<Scalar>&);
  void (*forward)(const RecurrenceShape<Scalar>&, const RecurrenceForward<Scalar>&, Scalar* scratch);
  void (*backward)(const RecurrenceShape<Scalar>&, const RecurrenceBackward<Scalar>&, Scalar* scratch);
};

/// Scalar is float or double.
ESPALIER_DECLARE_ISAS(template <class Scalar> const RecurrenceMath<Scalar>& recurrence_math())
template <class Scalar>
const RecurrenceMath<Scalar>& recurrence_math(InstructionSet isa) {
  return ESPALIER_OF_ISA(isa, recurrence_math<Scalar>());
}

}  // namespace espalier
