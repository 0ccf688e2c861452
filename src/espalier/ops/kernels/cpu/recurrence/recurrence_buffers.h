// SPDX-License-Identifier: Apache-2.0
// Scratch of the loops of RecurrenceMath, compiled for the instruction set of the including file, which
// defines ESPALIER_CPU_NAMESPACE.
#pragma once

#include "espalier/ops/kernels/cpu/recurrence/recurrence_math.h"

namespace espalier::ESPALIER_CPU_NAMESPACE {
namespace {

inline int64_t padded(int64_t count) {
  return (count + 15) / 16 * 16;
}

// L tokens, at most the chunk size; P, K and V: it, Dk and Dv rounded up to whole vectors.
template <class Scalar>
struct Buffers {
  Scalar* base;
  int64_t used = 0;
  int64_t tokens, keys, values;  // P, K, V

  Scalar* rows;       // [2 L, K] q scaled, then k
  Scalar* columns_q;  // [Dk, P] their transposes
  Scalar* columns_k;
  Scalar* raw;                    // [2 L, P] q k^T, then k k^T, up to the diagonal
  Scalar *decay, *scores;         // [L, P] D, D q k^T, zeros above the diagonal
  Scalar* system;                 // [L, P] -A
  Scalar* scaled;                 // [2 L, K] rows times factors
  Scalar* read;                   // [2 L, V] rows times the state
  Scalar* news;                   // [L, V] n
  Scalar *before, *after, *beta;  // [P]
  double* sum;                    // [P] of logarithms

  // Backward pass.
  Scalar* grad_rows;                               // [2 L, V] gradients of out, then of v
  Scalar* grad_columns;                            // [Dv, 2 P] their transposes
  Scalar* news_columns;                            // [Dv, P]
  Scalar* grad_raw;                                // [2 L, P] gradients of scores, then of -A, without decays
  Scalar *state_products, *grad_products;          // [Dk, 2 P], [Dk, P] products of states with columns
  Scalar *sum_q, *sum_k, *transposed;              // [L, P] gradients of q k^T and k k^T, summed over heads
  Scalar *grad_q, *grad_k;                         // [Dk, P]
  Scalar* between;                                 // [P] sums of gradients of log decays over later rows
  Scalar *dots_q, *dots_k, *dots_end, *grad_beta;  // [P]

  Buffers(const RecurrenceShape<Scalar>& shape, Scalar* at)
      : base(at), tokens(padded(shape.chunk_size)), keys(padded(shape.key_dim)), values(shape.state_stride) {
    rows = take(2 * tokens * keys);
    columns_q = take(shape.key_dim * tokens);
    columns_k = take(shape.key_dim * tokens);
    raw = take(2 * tokens * tokens);
    decay = take(tokens * tokens);
    scores = take(tokens * tokens);
    system = take(tokens * tokens);
    scaled = take(2 * tokens * keys);
    read = take(2 * tokens * values);
    news = take(tokens * values);
    before = take(tokens);
    after = take(tokens);
    beta = take(tokens);
    sum = reinterpret_cast<double*>(take(2 * tokens));
    grad_rows = take(2 * tokens * values);
    grad_columns = take(shape.value_dim * 2 * tokens);
    news_columns = take(shape.value_dim * tokens);
    grad_raw = take(2 * tokens * tokens);
    state_products = take(shape.key_dim * 2 * tokens);
    grad_products = take(shape.key_dim * tokens);
    sum_q = take(tokens * tokens);
    sum_k = take(tokens * tokens);
    transposed = take(tokens * tokens);
    grad_q = take(shape.key_dim * tokens);
    grad_k = take(shape.key_dim * tokens);
    between = take(tokens);
    dots_q = take(tokens);
    dots_k = take(tokens);
    dots_end = take(tokens);
    grad_beta = take(tokens);
  }

  Scalar* take(int64_t count) {
    Scalar* taken = base == nullptr ? nullptr : base + used;  // without memory, only counts
    used += count;
    return taken;
  }
};

}  // namespace
}  // namespace espalier::ESPALIER_CPU_NAMESPACE
