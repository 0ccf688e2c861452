// SPDX-License-Identifier: Apache-2.0
// The bodies of RecurrenceMath, for the vector instructions that the including file is compiled with; it
// defines ESPALIER_CPU_NAMESPACE. Nothing here may call an inline function of another header, those of
// isa_math.h and small_product.h apart: the linker would keep one copy of it for all instruction sets.
//   With b, a and w the products of decays up to a token, after it, and of the whole chunk, D_ij = b_i / b_j:
//   reads Q S and K S, scores D (q k^T), and n from the triangular system (I + A) n = beta (v - b K S) by
//   substitution, A_ij = beta_i D_ij k_i k_j for j < i. Then out = b (Q S) + scores n, and S becomes
//   w S + (a K)^T n. The backward pass is the adjoint of each step. Operands stay in the second-level cache;
//   gradients of q and k are summed transposed, so that the columns of every product are tokens or values.
#pragma once

#include "espalier/ops/kernels/cpu/isa_math.h"
#include "espalier/ops/kernels/cpu/recurrence/recurrence_math.h"
#include "espalier/ops/kernels/cpu/recurrence/small_product.h"

namespace espalier::ESPALIER_CPU_NAMESPACE {
namespace {

inline int64_t padded(int64_t count) {
  return (count + 15) / 16 * 16;
}

// Rows that are multiplied at once with what is left of the diagonal.
constexpr int64_t kDiagonalRows = 16;
// Rows that are substituted one by one.
constexpr int64_t kSubstitutedRows = 8;

// Scratch. L tokens, at most the chunk size; P, K and V: it, Dk and Dv rounded up to whole vectors.
template <class Scalar>
struct Room {
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
  Scalar* read;                   // [2 L, V] what is read of a state
  Scalar* news;                   // [L, V] n
  Scalar *before, *after, *beta;  // [P]
  double* sum;                    // [P] of logarithms

  // Of the backward pass.
  Scalar* grad_rows;                               // [2 L, V] gradients of out, then of v
  Scalar* grad_columns;                            // [Dv, 2 P] their transposes
  Scalar* news_columns;                            // [Dv, P]
  Scalar* grad_raw;                                // [2 L, P] gradients of scores, then of -A, without decays
  Scalar *of_state, *of_grad;                      // [Dk, 2 P], [Dk, P] products of states with columns
  Scalar *sum_q, *sum_k, *transposed;              // [L, P] gradients of q k^T and k k^T, summed over heads
  Scalar *grad_q, *grad_k;                         // [Dk, P]
  Scalar* between;                                 // [P] sums of gradients of log decays over later rows
  Scalar *dots_q, *dots_k, *dots_end, *grad_beta;  // [P]

  Room(const RecurrenceShape<Scalar>& shape, Scalar* at)
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
    of_state = take(shape.key_dim * 2 * tokens);
    of_grad = take(shape.key_dim * tokens);
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
    Scalar* taken = base == nullptr ? nullptr : base + used;  // a room without memory only counts
    used += count;
    return taken;
  }
};

// to[r, i] = factor * from[r, i].
template <class Scalar>
void copy_rows(const Scalar* from, int64_t from_stride, int64_t count, int64_t width, Scalar factor,
               Scalar* to, int64_t to_stride) {
  for (int64_t r = 0; r < count; ++r) {
    const Scalar* __restrict source = from + r * from_stride;
    Scalar* __restrict target = to + r * to_stride;
    for (int64_t i = 0; i < width; ++i) target[i] = factor * source[i];
  }
}

// to[r, i] = factor[r] * from[r, i].
template <class Scalar>
void scale_rows(const Scalar* from, const Scalar* factor, int64_t count, int64_t width, Scalar* to) {
  for (int64_t r = 0; r < count; ++r)
    copy_rows(from + r * width, int64_t{0}, 1, width, factor[r], to + r * width, int64_t{0});
}

// to[i, r] = from[r, i], square by square: both sides stay in the nearest cache.
template <class Scalar>
void transpose(const Scalar* from, int64_t from_stride, int64_t count, int64_t width, Scalar* to,
               int64_t to_stride) {
  constexpr int64_t kSquare = 16;
  for (int64_t r0 = 0; r0 < count; r0 += kSquare) {
    const int64_t r1 = r0 + kSquare < count ? r0 + kSquare : count;
    for (int64_t i = 0; i < width; ++i) {
      for (int64_t r = r0; r < r1; ++r) to[i * to_stride + r] = from[r * from_stride + i];
    }
  }
}

// C = A B up to the diagonal of the first `size` rows; rows of A are `a_row` apart.
template <class Scalar>
void multiply_lower(SmallProduct<Scalar> p) {
  const int64_t size = p.rows;
  const Scalar* a = p.a;
  Scalar* c = p.c;
  for (int64_t row = 0; row < size; row += kDiagonalRows) {
    p.rows = size - row < kDiagonalRows ? size - row : kDiagonalRows;
    p.columns = row + p.rows;
    p.a = a + row * p.a_row;
    p.c = c + row * p.c_stride;
    multiply(p);
  }
}

// C = A B + factor * from, A [size, size] zero above the diagonal (transposed: below).
template <class Scalar>
void multiply_by_triangle(SmallProduct<Scalar> p, bool is_transposed) {
  const int64_t size = p.rows;
  const SmallProduct<Scalar> whole = p;
  for (int64_t row = 0; row < size; row += kDiagonalRows) {
    p.rows = size - row < kDiagonalRows ? size - row : kDiagonalRows;
    const int64_t first = is_transposed ? row : 0;
    p.terms = (is_transposed ? size : row + p.rows) - first;
    p.a = whole.a + row * p.a_row + first * p.a_term;
    p.b = whole.b + first * p.b_stride;
    p.c = whole.c + row * p.c_stride;
    p.from = whole.from == nullptr ? nullptr : whole.from + row * p.c_stride;
    multiply(p);
  }
}

// x += factor * y.
template <class Scalar>
inline void add_row(Scalar factor, const Scalar* __restrict y, int64_t width, Scalar* __restrict x) {
  for (int64_t i = 0; i < width; ++i) x[i] += factor * y[i];
}

// Solves (I + A) X = B in place, given -A; transposed: (I + A)^T X = B.
template <class Scalar>
void substitute(const Scalar* system, int64_t stride, int64_t size, bool is_transposed, Scalar* x,
                int64_t width) {
  const int64_t blocks = (size + kSubstitutedRows - 1) / kSubstitutedRows;
  for (int64_t n = 0; n < blocks; ++n) {
    const int64_t begin = (is_transposed ? blocks - 1 - n : n) * kSubstitutedRows;
    const int64_t end = begin + kSubstitutedRows < size ? begin + kSubstitutedRows : size;
    const int64_t known = is_transposed ? end : 0, count = is_transposed ? size - end : begin;
    SmallProduct<Scalar> p{end - begin,
                           width,
                           count,
                           nullptr,
                           stride,
                           1,
                           x + known * width,
                           width,
                           x + begin * width,
                           width,
                           x + begin * width,
                           Scalar(1)};
    if (is_transposed) {
      p.a = system + known * stride + begin;
      p.a_row = 1;
      p.a_term = stride;
    } else {
      p.a = system + begin * stride;
    }
    if (count > 0) multiply(p);
    if (is_transposed) {
      for (int64_t i = end - 2; i >= begin; --i) {
        for (int64_t j = i + 1; j < end; ++j)
          add_row(system[j * stride + i], x + j * width, width, x + i * width);
      }
    } else {
      for (int64_t i = begin + 1; i < end; ++i) {
        for (int64_t j = begin; j < i; ++j)
          add_row(system[i * stride + j], x + j * width, width, x + i * width);
      }
    }
  }
}

// What a chunk's rows are before heads are looked at. With `only_keys` nothing of q.
template <class Scalar>
void load_rows(const RecurrenceShape<Scalar>& shape, const RecurrenceRows<Scalar>& rows, bool only_keys,
               Room<Scalar>& room) {
  const int64_t size = rows.size, width = shape.key_dim;
  Scalar* keys = room.rows + size * room.keys;
  copy_rows(rows.k, shape.key_stride, size, width, Scalar(1), keys, room.keys);
  transpose(rows.k, shape.key_stride, size, width, room.columns_k, room.tokens);
  SmallProduct<Scalar> p{
      size,       0, width, keys, room.keys, 1, room.columns_k, room.tokens, room.raw + size * room.tokens,
      room.tokens};
  if (shape.delta) multiply_lower(p);
  if (only_keys) return;
  copy_rows(rows.q, shape.key_stride, size, width, shape.scale, room.rows, room.keys);
  p.a = room.rows;
  p.c = room.raw;
  multiply_lower(p);
}

// Decays of head h, and what they make of the products of rows. Returns that of the whole chunk.
template <class Scalar>
Scalar load_head(const RecurrenceShape<Scalar>& shape, const RecurrenceRows<Scalar>& rows, int64_t h,
                 Room<Scalar>& room) {
  const int64_t size = rows.size, stride = room.tokens;
  double sum = 0;
  for (int64_t i = 0; i < size; ++i) {
    sum += static_cast<double>(rows.g[i * shape.number_stride + h]);
    room.sum[i] = sum;
    if (shape.delta) room.beta[i] = rows.beta[i * shape.number_stride + h];
  }
  for (int64_t i = 0; i < size; ++i) {
    room.before[i] = exp_of(static_cast<Scalar>(room.sum[i]));
    room.after[i] = exp_of(static_cast<Scalar>(sum - room.sum[i]));
  }
  for (int64_t i = 0; i < size; ++i) {
    const double own = room.sum[i];
    const double* __restrict sums = room.sum;
    const Scalar* __restrict raw = room.raw + i * stride;
    Scalar* __restrict decay = room.decay + i * stride;
    Scalar* __restrict scores = room.scores + i * stride;
    for (int64_t j = 0; j <= i; ++j) decay[j] = exp_of(static_cast<Scalar>(own - sums[j]));
    for (int64_t j = 0; j <= i; ++j) scores[j] = decay[j] * raw[j];
    for (int64_t j = i + 1; j < padded(size); ++j) decay[j] = scores[j] = 0;
    if (!shape.delta) continue;
    const Scalar beta = -room.beta[i];
    const Scalar* __restrict keys = room.raw + (size + i) * stride;
    Scalar* __restrict system = room.system + i * stride;
    for (int64_t j = 0; j < i; ++j) system[j] = beta * decay[j] * keys[j];
  }
  return exp_of(static_cast<Scalar>(sum));
}

// room.read = rows times the state: of q unless only_keys, of k with the delta rule.
template <class Scalar>
void read_state(const RecurrenceShape<Scalar>& shape, int64_t size, const Scalar* state, bool only_keys,
                Room<Scalar>& room) {
  const int64_t first = only_keys ? size : 0, last = shape.delta ? 2 * size : size;
  multiply(SmallProduct<Scalar>{last - first, shape.value_dim, shape.key_dim, room.rows + first * room.keys,
                                room.keys, 1, state, room.values, room.read + first * room.values,
                                room.values});
}

// room.news = n of head h.
template <class Scalar>
void find_news(const RecurrenceShape<Scalar>& shape, const RecurrenceRows<Scalar>& rows, int64_t h,
               bool has_state, Room<Scalar>& room) {
  const int64_t width = shape.value_dim;
  for (int64_t i = 0; i < rows.size; ++i) {
    const Scalar* __restrict v = rows.v + i * shape.value_stride + h * width;
    const Scalar* __restrict old = room.read + (rows.size + i) * room.values;
    Scalar* __restrict news = room.news + i * room.values;
    const Scalar beta = shape.delta ? room.beta[i] : Scalar(1), decay = room.before[i];
    if (shape.delta && has_state) {
      for (int64_t d = 0; d < width; ++d) news[d] = beta * (v[d] - decay * old[d]);
    } else {
      for (int64_t d = 0; d < width; ++d) news[d] = beta * v[d];
    }
  }
  if (shape.delta) substitute(room.system, room.tokens, rows.size, false, room.news, room.values);
}

template <class Scalar>
void write_out(const RecurrenceShape<Scalar>& shape, const RecurrenceForward<Scalar>& given, int64_t h,
               Room<Scalar>& room) {
  const int64_t size = given.rows.size;
  if (given.start != nullptr) scale_rows(room.read, room.before, size, room.values, room.read);
  multiply_by_triangle(
      SmallProduct<Scalar>{size, shape.value_dim, size, room.scores, room.tokens, 1, room.news, room.values,
                           room.read, room.values, given.start != nullptr ? room.read : nullptr, Scalar(1)},
      false);
  copy_rows(room.read, room.values, size, shape.value_dim, Scalar(1), given.out + h * shape.value_dim,
            shape.value_stride);
}

template <class Scalar>
void forward(const RecurrenceShape<Scalar>& shape, const RecurrenceForward<Scalar>& given, Scalar* scratch) {
  Room<Scalar> room(shape, scratch);
  const int64_t size = given.rows.size, state_size = shape.key_dim * shape.state_stride;
  const bool only_keys = given.out == nullptr;
  load_rows(shape, given.rows, only_keys, room);
  const Scalar* keys = room.rows + size * room.keys;
  for (int64_t h = 0; h < shape.num_heads; ++h) {
    const Scalar whole = load_head(shape, given.rows, h, room);
    const Scalar* start = given.start == nullptr ? nullptr : given.start + h * state_size;
    if (start != nullptr && (shape.delta || !only_keys)) read_state(shape, size, start, only_keys, room);
    find_news(shape, given.rows, h, start != nullptr, room);
    if (given.news != nullptr) {
      copy_rows(room.news, room.values, size, shape.value_dim, Scalar(1), given.news + h * size * room.values,
                room.values);
    }
    if (given.out != nullptr) write_out(shape, given, h, room);
    if (given.end == nullptr) continue;
    scale_rows(keys, room.after, size, room.keys, room.scaled);
    multiply(SmallProduct<Scalar>{shape.key_dim, shape.value_dim, size, room.scaled, 1, room.keys, room.news,
                                  room.values, given.end + h * state_size, room.values, start, whole});
  }
}

// ---- The backward pass ----

// room.grad_rows: the gradients of out, then of v's place in n's system.
template <class Scalar>
void find_grad_rows(const RecurrenceShape<Scalar>& shape, const RecurrenceBackward<Scalar>& given, int64_t h,
                    const Scalar* grad_end, Room<Scalar>& room) {
  const int64_t size = given.rows.size, width = shape.value_dim, stride = room.values;
  Scalar* of_news = room.grad_rows + size * stride;
  if (given.grad_out != nullptr) {
    copy_rows(given.grad_out + h * width, shape.value_stride, size, width, Scalar(1), room.grad_rows, stride);
    multiply_by_triangle(SmallProduct<Scalar>{size, width, size, room.scores, 1, room.tokens, room.grad_rows,
                                              stride, of_news, stride},
                         true);
  } else {
    for (int64_t i = 0; i < 2 * size * stride; ++i) room.grad_rows[i] = 0;
  }
  if (grad_end != nullptr) {
    scale_rows(room.rows + size * room.keys, room.after, size, room.keys, room.scaled);
    multiply(SmallProduct<Scalar>{size, width, shape.key_dim, room.scaled, room.keys, 1, grad_end, stride,
                                  of_news, stride, of_news, Scalar(1)});
  }
  if (shape.delta) substitute(room.system, room.tokens, size, true, of_news, stride);
  for (int64_t i = 0; i < size; ++i) {
    copy_rows(of_news + i * stride, int64_t{0}, 1, width, shape.delta ? room.beta[i] : Scalar(1),
              given.grad_v + i * shape.value_stride + h * width, int64_t{0});
  }
}

// Gradients of the products of rows, summed over heads, and of the logarithms of D: between[j] sums those of
// column j over the rows so far, from the last one. grad_g begins with what they give.
template <class Scalar>
void add_grad_raw(const RecurrenceShape<Scalar>& shape, const RecurrenceBackward<Scalar>& given, int64_t h,
                  Room<Scalar>& room) {
  const int64_t size = given.rows.size, stride = room.tokens;
  for (int64_t i = 0; i < size; ++i) room.between[i] = 0;
  for (int64_t i = size - 1; i >= 0; --i) {
    const Scalar* __restrict decay = room.decay + i * stride;
    const Scalar* __restrict scores = room.scores + i * stride;
    const Scalar* __restrict grad = room.grad_raw + i * stride;
    Scalar* __restrict sum_q = room.sum_q + i * stride;
    Scalar* __restrict between = room.between;
    for (int64_t j = 0; j <= i; ++j) sum_q[j] += grad[j] * decay[j];
    for (int64_t j = 0; j < i; ++j) between[j] += grad[j] * scores[j];
    if (shape.delta) {
      const Scalar beta = room.beta[i];
      const Scalar* __restrict of_system = room.grad_raw + (size + i) * stride;  // of -A
      const Scalar* __restrict system = room.system + i * stride;
      const Scalar* __restrict keys = room.raw + (size + i) * stride;
      Scalar* __restrict sum_k = room.sum_k + i * stride;
      Scalar of_beta = 0;
      for (int64_t j = 0; j < i; ++j) {
        sum_k[j] -= of_system[j] * beta * decay[j];
        between[j] += of_system[j] * system[j];
        of_beta -= of_system[j] * decay[j] * keys[j];
      }
      room.grad_beta[i] = of_beta;
    }
    Scalar inside = 0;
    for (int64_t j = 0; j < i; ++j) inside += room.between[j];
    given.grad_g[i * shape.number_stride + h] = inside;
  }
}

// dots[i] = sum over d of a[d, i] * b[d, i].
template <class Scalar>
void dot_columns(const Scalar* a, int64_t a_stride, const Scalar* b, int64_t b_stride, int64_t height,
                 int64_t count, Scalar* __restrict dots) {
  for (int64_t i = 0; i < count; ++i) dots[i] = 0;
  for (int64_t d = 0; d < height; ++d) {
    const Scalar* __restrict x = a + d * a_stride;
    const Scalar* __restrict y = b + d * b_stride;
    for (int64_t i = 0; i < count; ++i) dots[i] += x[i] * y[i];
  }
}

// What the rows have to do with the state before the chunk.
template <class Scalar>
void add_grad_of_reads(const RecurrenceShape<Scalar>& shape, int64_t size, const Scalar* start,
                       Room<Scalar>& room) {
  const int64_t stride = room.tokens;
  multiply(SmallProduct<Scalar>{shape.key_dim, shape.delta ? stride + size : size, shape.value_dim, start,
                                room.values, 1, room.grad_columns, 2 * stride, room.of_state, 2 * stride});
  dot_columns(room.of_state, 2 * stride, room.columns_q, stride, shape.key_dim, size, room.dots_q);
  if (shape.delta)
    dot_columns(room.of_state + stride, 2 * stride, room.columns_k, stride, shape.key_dim, size, room.dots_k);
  const Scalar* __restrict before = room.before;
  const Scalar* __restrict beta = room.beta;
  for (int64_t d = 0; d < shape.key_dim; ++d) {
    const Scalar* __restrict of_q = room.of_state + d * 2 * stride;
    const Scalar* __restrict of_k = of_q + stride;
    Scalar* __restrict grad_q = room.grad_q + d * stride;
    Scalar* __restrict grad_k = room.grad_k + d * stride;
    for (int64_t i = 0; i < size; ++i) grad_q[i] += before[i] * of_q[i];
    if (!shape.delta) continue;
    for (int64_t i = 0; i < size; ++i) grad_k[i] -= before[i] * beta[i] * of_k[i];
  }
}

// What they have to do with the state after it.
template <class Scalar>
void add_grad_of_writes(const RecurrenceShape<Scalar>& shape, int64_t size, const Scalar* grad_end,
                        Room<Scalar>& room) {
  const int64_t stride = room.tokens;
  multiply(SmallProduct<Scalar>{shape.key_dim, size, shape.value_dim, grad_end, room.values, 1,
                                room.news_columns, stride, room.of_grad, stride});
  dot_columns(room.of_grad, stride, room.columns_k, stride, shape.key_dim, size, room.dots_end);
  const Scalar* __restrict after = room.after;
  for (int64_t d = 0; d < shape.key_dim; ++d) {
    const Scalar* __restrict of_k = room.of_grad + d * stride;
    Scalar* __restrict grad_k = room.grad_k + d * stride;
    for (int64_t i = 0; i < size; ++i) grad_k[i] += after[i] * of_k[i];
  }
}

// The sum of a b over a state.
template <class Scalar>
Scalar dot_states(const RecurrenceShape<Scalar>& shape, const Scalar* a, const Scalar* b, Scalar* rows) {
  Scalar sum = 0;
  for (int64_t d = 0; d < shape.key_dim; ++d) {
    const Scalar* __restrict x = a + d * shape.state_stride;
    const Scalar* __restrict y = b + d * shape.state_stride;
    for (int64_t i = 0; i < shape.value_dim; ++i) rows[i] = d == 0 ? x[i] * y[i] : rows[i] + x[i] * y[i];
  }
  for (int64_t i = 0; i < shape.value_dim; ++i) sum += rows[i];
  return sum;
}

// Gradients of numbers of tokens from what is in room.
template <class Scalar>
void write_numbers(const RecurrenceShape<Scalar>& shape, const RecurrenceBackward<Scalar>& given, int64_t h,
                   Scalar of_whole, Room<Scalar>& room) {
  const int64_t size = given.rows.size;
  Scalar of_before = 0;  // of this token and later ones
  for (int64_t i = size - 1; i >= 0; --i) {
    of_before += room.before[i] * room.dots_q[i];
    if (shape.delta) of_before -= room.beta[i] * room.before[i] * room.dots_k[i];
    given.grad_g[i * shape.number_stride + h] += of_before + of_whole;
  }
  Scalar of_after = 0;  // of earlier ones
  for (int64_t i = 0; i < size; ++i) {
    given.grad_g[i * shape.number_stride + h] += of_after;
    of_after += room.after[i] * room.dots_end[i];
  }
  if (!shape.delta) return;
  for (int64_t i = 0; i < size; ++i) {
    const Scalar* __restrict v = given.rows.v + i * shape.value_stride + h * shape.value_dim;
    const Scalar* __restrict grad = room.grad_rows + (size + i) * room.values;
    Scalar dot = 0;
    for (int64_t d = 0; d < shape.value_dim; ++d) dot += grad[d] * v[d];
    given.grad_beta[i * shape.number_stride + h] = room.grad_beta[i] + dot - room.before[i] * room.dots_k[i];
  }
}

template <class Scalar>
void write_grad_start(const RecurrenceShape<Scalar>& shape, const RecurrenceBackward<Scalar>& given,
                      int64_t h, Scalar whole, Room<Scalar>& room) {
  const int64_t size = given.rows.size, state_size = shape.key_dim * shape.state_stride;
  Scalar* target = given.grad_start + h * state_size;
  const Scalar* end = given.grad_end == nullptr ? nullptr : given.grad_end + h * state_size;
  if (given.add_to_start && end != nullptr) {
    for (int64_t i = 0; i < state_size; ++i) target[i] += whole * end[i];
  }
  scale_rows(room.rows, room.before, size, room.keys, room.scaled);
  if (shape.delta) {
    for (int64_t i = 0; i < size; ++i) room.between[i] = -room.before[i] * room.beta[i];
    scale_rows(room.rows + size * room.keys, room.between, size, room.keys, room.scaled + size * room.keys);
  }
  multiply(SmallProduct<Scalar>{shape.key_dim, shape.value_dim, shape.delta ? 2 * size : size, room.scaled, 1,
                                room.keys, room.grad_rows, room.values, target, room.values,
                                given.add_to_start ? target : end, given.add_to_start ? Scalar(1) : whole});
}

template <class Scalar>
void backward_head(const RecurrenceShape<Scalar>& shape, const RecurrenceBackward<Scalar>& given, int64_t h,
                   Room<Scalar>& room) {
  const int64_t size = given.rows.size, stride = room.tokens, width = shape.value_dim;
  const int64_t state_size = shape.key_dim * shape.state_stride;
  const Scalar* start = given.start == nullptr ? nullptr : given.start + h * state_size;
  const Scalar* end = given.grad_end == nullptr ? nullptr : given.grad_end + h * state_size;
  const Scalar whole = load_head(shape, given.rows, h, room);
  const Scalar* news = room.news;
  if (shape.delta) {
    news = given.news + h * size * room.values;
  } else {
    find_news(shape, given.rows, h, false, room);
  }
  find_grad_rows(shape, given, h, end, room);
  transpose(news, room.values, size, width, room.news_columns, stride);
  transpose(room.grad_rows, room.values, size, width, room.grad_columns, 2 * stride);
  SmallProduct<Scalar> p{
      size, 0, width, room.grad_rows, room.values, 1, room.news_columns, stride, room.grad_raw, stride};
  multiply_lower(p);
  if (shape.delta) {
    p.a += size * room.values;
    p.c += size * stride;
    multiply_lower(p);
    transpose(p.a, room.values, size, width, room.grad_columns + stride, 2 * stride);
  }
  add_grad_raw(shape, given, h, room);
  for (int64_t i = 0; i < size; ++i) room.dots_q[i] = room.dots_k[i] = room.dots_end[i] = 0;
  if (start != nullptr) add_grad_of_reads(shape, size, start, room);
  if (end != nullptr) add_grad_of_writes(shape, size, end, room);
  const Scalar of_whole =
      start == nullptr || end == nullptr ? Scalar(0) : whole * dot_states(shape, start, end, room.read);
  write_numbers(shape, given, h, of_whole, room);
  if (given.grad_start != nullptr) write_grad_start(shape, given, h, whole, room);
}

// Of gradients of q k^T and k k^T those of q and k, which are written.
template <class Scalar>
void write_keys(const RecurrenceShape<Scalar>& shape, const RecurrenceBackward<Scalar>& given,
                Room<Scalar>& room) {
  const int64_t size = given.rows.size, stride = room.tokens;
  const Scalar* keys = room.rows + size * room.keys;
  const auto add = [&](const Scalar* rows, const Scalar* weights, Scalar* to) {
    multiply(SmallProduct<Scalar>{shape.key_dim, size, size, rows, 1, room.keys, weights, stride, to, stride,
                                  to, Scalar(1)});
  };
  transpose(room.sum_q, stride, size, size, room.transposed, stride);
  add(keys, room.transposed, room.grad_q);
  add(room.rows, room.sum_q, room.grad_k);
  if (shape.delta) {
    transpose(room.sum_k, stride, size, size, room.transposed, stride);
    add_row(Scalar(1), room.sum_k, size * stride, room.transposed);
    add(keys, room.transposed, room.grad_k);
  }
  for (int64_t d = 0; d < shape.key_dim; ++d) {
    for (int64_t i = 0; i < size; ++i) room.grad_q[d * stride + i] *= shape.scale;
  }
  transpose(room.grad_q, stride, shape.key_dim, size, given.grad_q, shape.key_stride);
  transpose(room.grad_k, stride, shape.key_dim, size, given.grad_k, shape.key_stride);
}

template <class Scalar>
void backward(const RecurrenceShape<Scalar>& shape, const RecurrenceBackward<Scalar>& given,
              Scalar* scratch) {
  Room<Scalar> room(shape, scratch);
  const int64_t size = given.rows.size;
  load_rows(shape, given.rows, false, room);
  transpose(room.rows, room.keys, size, shape.key_dim, room.columns_q, room.tokens);
  for (int64_t i = 0; i < size * room.tokens; ++i) room.sum_q[i] = room.sum_k[i] = 0;
  for (int64_t i = 0; i < shape.key_dim * room.tokens; ++i) room.grad_q[i] = room.grad_k[i] = 0;
  for (int64_t h = 0; h < shape.num_heads; ++h) backward_head(shape, given, h, room);
  write_keys(shape, given, room);
}

template <class Scalar>
int64_t scratch(const RecurrenceShape<Scalar>& shape) {
  return Room<Scalar>(shape, nullptr).used;
}

}  // namespace

template <class Scalar>
const RecurrenceMath<Scalar>& recurrence_math() {
  static constexpr RecurrenceMath<Scalar> kMath{&scratch<Scalar>, &forward<Scalar>, &backward<Scalar>};
  return kMath;
}

template const RecurrenceMath<double>& recurrence_math<double>();
template const RecurrenceMath<float>& recurrence_math<float>();

}  // namespace espalier::ESPALIER_CPU_NAMESPACE
