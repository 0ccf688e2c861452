// SPDX-License-Identifier: Apache-2.0
// Linear recurrences with matrix states inside one chunk of tokens on the CPU, compiled once for each
// InstructionSet. Formulas: docs/math.md, "Linear recurrences on trees".
//
// With rows q, k [Dk] and v [Dv] of a token, its decay exp(g), and the state S' [Dk, Dv] of the token before:
//   S = exp(g) S' + k n^T,  out = S^T (scale q),
// where n = v, or with the delta rule n = beta (v - (exp(g) S')^T k). Everything is summed in Scalar, apart
// from the logarithms of decays, which are summed in float64. The bits of a result do not depend on which
// other chunks are computed.
#pragma once

#include <cstdint>

#include "espalier/ops/kernels/cpu/isa_dispatch.h"

namespace espalier {

/// Some heads that read the same q and k, H of them, and how the rows of their tokens lie.
template <class Scalar>
struct RecurrenceShape {
  bool delta;  // the delta rule, else v is added as it is
  Scalar scale;
  int64_t num_heads;                                // H
  int64_t key_dim;                                  // Dk
  int64_t value_dim;                                // Dv
  int64_t chunk_size;                               // the most tokens of a chunk
  int64_t key_stride, value_stride, number_stride;  // from token to token; heads of a token are adjacent
  int64_t state_stride;  // from row to row of a state: state_stride_of(Dv); the states of heads are adjacent
};

/// Rows of states are padded with zeros to whole vectors.
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
  const Scalar* beta;   // [L, H]; not read without the delta rule
};

template <class Scalar>
struct RecurrenceForward {
  RecurrenceRows<Scalar> rows;
  const Scalar* start;  // [H, Dk, Dv]: states before the chunk, null: zeros
  Scalar* end;          // states after it, null: not wanted; may be `start`
  Scalar* out;          // [L, H, Dv] as v lies, null: not wanted
  Scalar* news;         // [H, L, state_stride]: n of the delta rule, null: not wanted
};

template <class Scalar>
struct RecurrenceBackward {
  RecurrenceRows<Scalar> rows;
  const Scalar* start;     // as in the forward pass
  const Scalar* news;      // what that wrote with the delta rule
  const Scalar* grad_out;  // as v lies, null: zeros
  const Scalar* grad_end;  // of the states after the chunk, null: zeros
  Scalar* grad_start;      // of those before it, null: not wanted; may be `grad_end`
  bool add_to_start;       // grad_start is added to
  Scalar *grad_q, *grad_k, *grad_v, *grad_g,
      *grad_beta;  // as the rows lie; grad_beta of the delta rule alone
};

template <class Scalar>
struct RecurrenceMath {
  /// Scalars of scratch that each function needs, whatever is in it.
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
