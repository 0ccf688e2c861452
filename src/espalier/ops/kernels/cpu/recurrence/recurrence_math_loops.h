// SPDX-License-Identifier: Apache-2.0
// The loops of RecurrenceMath, compiled for the instruction set of the including file, which defines
// ESPALIER_CPU_NAMESPACE. Must not call inline functions of headers other than isa_math.h, small_product.h
// and recurrence_buffers.h: the linker would merge their copies for different instruction sets.
//   With b, a and w the products of decays up to a token, after it, and of the whole chunk, D_ij = b_i / b_j:
//   reads Q S and K S, scores D (q k^T), and n from the triangular system (I + A) n = beta (v - b K S) by
//   substitution, A_ij = beta_i D_ij k_i k_j for j < i. Then out = b (Q S) + scores n, and S becomes
//   w S + (a K)^T n. The backward pass is the adjoint of each step. Operands fit the L2 cache; gradients of q
//   and k are summed transposed, so that the columns of every product are tokens or values.
#pragma once

#include "espalier/ops/kernels/cpu/isa_math.h"
#include "espalier/ops/kernels/cpu/recurrence/recurrence_buffers.h"
#include "espalier/ops/kernels/cpu/recurrence/recurrence_math.h"
#include "espalier/ops/kernels/cpu/recurrence/small_product.h"

namespace espalier::ESPALIER_CPU_NAMESPACE {
namespace {

// Rows multiplied at once by the part left of the diagonal.
constexpr int64_t kDiagonalRows = 16;
// Rows substituted one by one.
constexpr int64_t kSubstitutedRows = 8;

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

// to[i, r] = from[r, i], in square blocks, for locality.
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

// Loads the rows of a chunk and their products, common to all heads; without q if `only_keys`.
template <class Scalar>
void load_rows(const RecurrenceShape<Scalar>& shape, const RecurrenceRows<Scalar>& rows, bool only_keys,
               Buffers<Scalar>& buffers) {
  const int64_t size = rows.size, width = shape.key_dim;
  Scalar* keys = buffers.rows + size * buffers.keys;
  copy_rows(rows.k, shape.key_stride, size, width, Scalar(1), keys, buffers.keys);
  transpose(rows.k, shape.key_stride, size, width, buffers.columns_k, buffers.tokens);
  SmallProduct<Scalar> p{size,
                         0,
                         width,
                         keys,
                         buffers.keys,
                         1,
                         buffers.columns_k,
                         buffers.tokens,
                         buffers.raw + size * buffers.tokens,
                         buffers.tokens};
  if (shape.delta) multiply_lower(p);
  if (only_keys) return;
  copy_rows(rows.q, shape.key_stride, size, width, shape.scale, buffers.rows, buffers.keys);
  p.a = buffers.rows;
  p.c = buffers.raw;
  multiply_lower(p);
}

// Computes the decays of head h and applies them to the products of rows. Returns the decay of the whole
// chunk.
template <class Scalar>
Scalar load_head(const RecurrenceShape<Scalar>& shape, const RecurrenceRows<Scalar>& rows, int64_t h,
                 Buffers<Scalar>& buffers) {
  const int64_t size = rows.size, stride = buffers.tokens;
  double sum = 0;
  for (int64_t i = 0; i < size; ++i) {
    sum += static_cast<double>(rows.g[i * shape.number_stride + h]);
    buffers.sum[i] = sum;
    if (shape.delta) buffers.beta[i] = rows.beta[i * shape.number_stride + h];
  }
  for (int64_t i = 0; i < size; ++i) {
    buffers.before[i] = exp_of(static_cast<Scalar>(buffers.sum[i]));
    buffers.after[i] = exp_of(static_cast<Scalar>(sum - buffers.sum[i]));
  }
  for (int64_t i = 0; i < size; ++i) {
    const double own = buffers.sum[i];
    const double* __restrict sums = buffers.sum;
    const Scalar* __restrict raw = buffers.raw + i * stride;
    Scalar* __restrict decay = buffers.decay + i * stride;
    Scalar* __restrict scores = buffers.scores + i * stride;
    for (int64_t j = 0; j <= i; ++j) decay[j] = exp_of(static_cast<Scalar>(own - sums[j]));
    for (int64_t j = 0; j <= i; ++j) scores[j] = decay[j] * raw[j];
    for (int64_t j = i + 1; j < padded(size); ++j) decay[j] = scores[j] = 0;
    if (!shape.delta) continue;
    const Scalar beta = -buffers.beta[i];
    const Scalar* __restrict keys = buffers.raw + (size + i) * stride;
    Scalar* __restrict system = buffers.system + i * stride;
    for (int64_t j = 0; j < i; ++j) system[j] = beta * decay[j] * keys[j];
  }
  return exp_of(static_cast<Scalar>(sum));
}

// buffers.read = rows times the state: of q unless only_keys, of k with the delta rule.
template <class Scalar>
void read_state(const RecurrenceShape<Scalar>& shape, int64_t size, const Scalar* state, bool only_keys,
                Buffers<Scalar>& buffers) {
  const int64_t first = only_keys ? size : 0, last = shape.delta ? 2 * size : size;
  multiply(SmallProduct<Scalar>{last - first, shape.value_dim, shape.key_dim,
                                buffers.rows + first * buffers.keys, buffers.keys, 1, state, buffers.values,
                                buffers.read + first * buffers.values, buffers.values});
}

// buffers.news = n of head h.
template <class Scalar>
void find_news(const RecurrenceShape<Scalar>& shape, const RecurrenceRows<Scalar>& rows, int64_t h,
               bool has_state, Buffers<Scalar>& buffers) {
  const int64_t width = shape.value_dim;
  for (int64_t i = 0; i < rows.size; ++i) {
    const Scalar* __restrict v = rows.v + i * shape.value_stride + h * width;
    const Scalar* __restrict old = buffers.read + (rows.size + i) * buffers.values;
    Scalar* __restrict news = buffers.news + i * buffers.values;
    const Scalar beta = shape.delta ? buffers.beta[i] : Scalar(1), decay = buffers.before[i];
    if (shape.delta && has_state) {
      for (int64_t d = 0; d < width; ++d) news[d] = beta * (v[d] - decay * old[d]);
    } else {
      for (int64_t d = 0; d < width; ++d) news[d] = beta * v[d];
    }
  }
  if (shape.delta) substitute(buffers.system, buffers.tokens, rows.size, false, buffers.news, buffers.values);
}

template <class Scalar>
void write_out(const RecurrenceShape<Scalar>& shape, const RecurrenceForward<Scalar>& given, int64_t h,
               Buffers<Scalar>& buffers) {
  const int64_t size = given.rows.size;
  if (given.start != nullptr) scale_rows(buffers.read, buffers.before, size, buffers.values, buffers.read);
  multiply_by_triangle(SmallProduct<Scalar>{size, shape.value_dim, size, buffers.scores, buffers.tokens, 1,
                                            buffers.news, buffers.values, buffers.read, buffers.values,
                                            given.start != nullptr ? buffers.read : nullptr, Scalar(1)},
                       false);
  copy_rows(buffers.read, buffers.values, size, shape.value_dim, Scalar(1), given.out + h * shape.value_dim,
            shape.value_stride);
}

template <class Scalar>
void forward(const RecurrenceShape<Scalar>& shape, const RecurrenceForward<Scalar>& given, Scalar* scratch) {
  Buffers<Scalar> buffers(shape, scratch);
  const int64_t size = given.rows.size, state_size = shape.key_dim * shape.state_stride;
  const bool only_keys = given.out == nullptr;
  load_rows(shape, given.rows, only_keys, buffers);
  const Scalar* keys = buffers.rows + size * buffers.keys;
  for (int64_t h = 0; h < shape.num_heads; ++h) {
    const Scalar whole = load_head(shape, given.rows, h, buffers);
    const Scalar* start = given.start == nullptr ? nullptr : given.start + h * state_size;
    if (start != nullptr && (shape.delta || !only_keys)) read_state(shape, size, start, only_keys, buffers);
    find_news(shape, given.rows, h, start != nullptr, buffers);
    if (given.news != nullptr) {
      copy_rows(buffers.news, buffers.values, size, shape.value_dim, Scalar(1),
                given.news + h * size * buffers.values, buffers.values);
    }
    if (given.out != nullptr) write_out(shape, given, h, buffers);
    if (given.end == nullptr) continue;
    scale_rows(keys, buffers.after, size, buffers.keys, buffers.scaled);
    multiply(SmallProduct<Scalar>{shape.key_dim, shape.value_dim, size, buffers.scaled, 1, buffers.keys,
                                  buffers.news, buffers.values, given.end + h * state_size, buffers.values,
                                  start, whole});
  }
}

// ---- The backward pass ----

// buffers.grad_rows: the gradients of out, then of v's place in n's system.
template <class Scalar>
void find_grad_rows(const RecurrenceShape<Scalar>& shape, const RecurrenceBackward<Scalar>& given, int64_t h,
                    const Scalar* grad_end, Buffers<Scalar>& buffers) {
  const int64_t size = given.rows.size, width = shape.value_dim, stride = buffers.values;
  Scalar* grad_news = buffers.grad_rows + size * stride;
  if (given.grad_out != nullptr) {
    copy_rows(given.grad_out + h * width, shape.value_stride, size, width, Scalar(1), buffers.grad_rows,
              stride);
    multiply_by_triangle(SmallProduct<Scalar>{size, width, size, buffers.scores, 1, buffers.tokens,
                                              buffers.grad_rows, stride, grad_news, stride},
                         true);
  } else {
    for (int64_t i = 0; i < 2 * size * stride; ++i) buffers.grad_rows[i] = 0;
  }
  if (grad_end != nullptr) {
    scale_rows(buffers.rows + size * buffers.keys, buffers.after, size, buffers.keys, buffers.scaled);
    multiply(SmallProduct<Scalar>{size, width, shape.key_dim, buffers.scaled, buffers.keys, 1, grad_end,
                                  stride, grad_news, stride, grad_news, Scalar(1)});
  }
  if (shape.delta) substitute(buffers.system, buffers.tokens, size, true, grad_news, stride);
  for (int64_t i = 0; i < size; ++i) {
    copy_rows(grad_news + i * stride, int64_t{0}, 1, width, shape.delta ? buffers.beta[i] : Scalar(1),
              given.grad_v + i * shape.value_stride + h * width, int64_t{0});
  }
}

// Gradients of the products of rows, summed over heads, and of the logarithms of D: between[j] sums those of
// column j over the rows so far, from the last one. Initialises grad_g.
template <class Scalar>
void add_grad_raw(const RecurrenceShape<Scalar>& shape, const RecurrenceBackward<Scalar>& given, int64_t h,
                  Buffers<Scalar>& buffers) {
  const int64_t size = given.rows.size, stride = buffers.tokens;
  for (int64_t i = 0; i < size; ++i) buffers.between[i] = 0;
  for (int64_t i = size - 1; i >= 0; --i) {
    const Scalar* __restrict decay = buffers.decay + i * stride;
    const Scalar* __restrict scores = buffers.scores + i * stride;
    const Scalar* __restrict grad = buffers.grad_raw + i * stride;
    Scalar* __restrict sum_q = buffers.sum_q + i * stride;
    Scalar* __restrict between = buffers.between;
    for (int64_t j = 0; j <= i; ++j) sum_q[j] += grad[j] * decay[j];
    for (int64_t j = 0; j < i; ++j) between[j] += grad[j] * scores[j];
    if (shape.delta) {
      const Scalar beta = buffers.beta[i];
      const Scalar* __restrict grad_system = buffers.grad_raw + (size + i) * stride;  // of -A
      const Scalar* __restrict system = buffers.system + i * stride;
      const Scalar* __restrict keys = buffers.raw + (size + i) * stride;
      Scalar* __restrict sum_k = buffers.sum_k + i * stride;
      Scalar grad_beta = 0;
      for (int64_t j = 0; j < i; ++j) {
        sum_k[j] -= grad_system[j] * beta * decay[j];
        between[j] += grad_system[j] * system[j];
        grad_beta -= grad_system[j] * decay[j] * keys[j];
      }
      buffers.grad_beta[i] = grad_beta;
    }
    Scalar inside = 0;
    for (int64_t j = 0; j < i; ++j) inside += buffers.between[j];
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

// Adds gradients of rows through the state before the chunk.
template <class Scalar>
void add_grad_of_reads(const RecurrenceShape<Scalar>& shape, int64_t size, const Scalar* start,
                       Buffers<Scalar>& buffers) {
  const int64_t stride = buffers.tokens;
  multiply(SmallProduct<Scalar>{shape.key_dim, shape.delta ? stride + size : size, shape.value_dim, start,
                                buffers.values, 1, buffers.grad_columns, 2 * stride, buffers.state_products,
                                2 * stride});
  dot_columns(buffers.state_products, 2 * stride, buffers.columns_q, stride, shape.key_dim, size,
              buffers.dots_q);
  if (shape.delta)
    dot_columns(buffers.state_products + stride, 2 * stride, buffers.columns_k, stride, shape.key_dim, size,
                buffers.dots_k);
  const Scalar* __restrict before = buffers.before;
  const Scalar* __restrict beta = buffers.beta;
  for (int64_t d = 0; d < shape.key_dim; ++d) {
    const Scalar* __restrict state_q = buffers.state_products + d * 2 * stride;
    const Scalar* __restrict state_k = state_q + stride;
    Scalar* __restrict grad_q = buffers.grad_q + d * stride;
    Scalar* __restrict grad_k = buffers.grad_k + d * stride;
    for (int64_t i = 0; i < size; ++i) grad_q[i] += before[i] * state_q[i];
    if (!shape.delta) continue;
    for (int64_t i = 0; i < size; ++i) grad_k[i] -= before[i] * beta[i] * state_k[i];
  }
}

// Adds gradients of rows through the state after the chunk.
template <class Scalar>
void add_grad_of_writes(const RecurrenceShape<Scalar>& shape, int64_t size, const Scalar* grad_end,
                        Buffers<Scalar>& buffers) {
  const int64_t stride = buffers.tokens;
  multiply(SmallProduct<Scalar>{shape.key_dim, size, shape.value_dim, grad_end, buffers.values, 1,
                                buffers.news_columns, stride, buffers.grad_products, stride});
  dot_columns(buffers.grad_products, stride, buffers.columns_k, stride, shape.key_dim, size,
              buffers.dots_end);
  const Scalar* __restrict after = buffers.after;
  for (int64_t d = 0; d < shape.key_dim; ++d) {
    const Scalar* __restrict state_k = buffers.grad_products + d * stride;
    Scalar* __restrict grad_k = buffers.grad_k + d * stride;
    for (int64_t i = 0; i < size; ++i) grad_k[i] += after[i] * state_k[i];
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

// Gradients of g and beta, from the contents of buffers.
template <class Scalar>
void write_numbers(const RecurrenceShape<Scalar>& shape, const RecurrenceBackward<Scalar>& given, int64_t h,
                   Scalar grad_whole, Buffers<Scalar>& buffers) {
  const int64_t size = given.rows.size;
  Scalar grad_before = 0;  // over this and later tokens
  for (int64_t i = size - 1; i >= 0; --i) {
    grad_before += buffers.before[i] * buffers.dots_q[i];
    if (shape.delta) grad_before -= buffers.beta[i] * buffers.before[i] * buffers.dots_k[i];
    given.grad_g[i * shape.number_stride + h] += grad_before + grad_whole;
  }
  Scalar grad_after = 0;  // over earlier tokens
  for (int64_t i = 0; i < size; ++i) {
    given.grad_g[i * shape.number_stride + h] += grad_after;
    grad_after += buffers.after[i] * buffers.dots_end[i];
  }
  if (!shape.delta) return;
  for (int64_t i = 0; i < size; ++i) {
    const Scalar* __restrict v = given.rows.v + i * shape.value_stride + h * shape.value_dim;
    const Scalar* __restrict grad = buffers.grad_rows + (size + i) * buffers.values;
    Scalar dot = 0;
    for (int64_t d = 0; d < shape.value_dim; ++d) dot += grad[d] * v[d];
    given.grad_beta[i * shape.number_stride + h] =
        buffers.grad_beta[i] + dot - buffers.before[i] * buffers.dots_k[i];
  }
}

template <class Scalar>
void write_grad_start(const RecurrenceShape<Scalar>& shape, const RecurrenceBackward<Scalar>& given,
                      int64_t h, Scalar whole, Buffers<Scalar>& buffers) {
  const int64_t size = given.rows.size, state_size = shape.key_dim * shape.state_stride;
  Scalar* target = given.grad_start + h * state_size;
  const Scalar* end = given.grad_end == nullptr ? nullptr : given.grad_end + h * state_size;
  if (given.add_to_start && end != nullptr) {
    for (int64_t i = 0; i < state_size; ++i) target[i] += whole * end[i];
  }
  scale_rows(buffers.rows, buffers.before, size, buffers.keys, buffers.scaled);
  if (shape.delta) {
    for (int64_t i = 0; i < size; ++i) buffers.between[i] = -buffers.before[i] * buffers.beta[i];
    scale_rows(buffers.rows + size * buffers.keys, buffers.between, size, buffers.keys,
               buffers.scaled + size * buffers.keys);
  }
  multiply(SmallProduct<Scalar>{shape.key_dim, shape.value_dim, shape.delta ? 2 * size : size, buffers.scaled,
                                1, buffers.keys, buffers.grad_rows, buffers.values, target, buffers.values,
                                given.add_to_start ? target : end, given.add_to_start ? Scalar(1) : whole});
}

template <class Scalar>
void backward_head(const RecurrenceShape<Scalar>& shape, const RecurrenceBackward<Scalar>& given, int64_t h,
                   Buffers<Scalar>& buffers) {
  const int64_t size = given.rows.size, stride = buffers.tokens, width = shape.value_dim;
  const int64_t state_size = shape.key_dim * shape.state_stride;
  const Scalar* start = given.start == nullptr ? nullptr : given.start + h * state_size;
  const Scalar* end = given.grad_end == nullptr ? nullptr : given.grad_end + h * state_size;
  const Scalar whole = load_head(shape, given.rows, h, buffers);
  const Scalar* news = buffers.news;
  if (shape.delta) {
    news = given.news + h * size * buffers.values;
  } else {
    find_news(shape, given.rows, h, false, buffers);
  }
  find_grad_rows(shape, given, h, end, buffers);
  transpose(news, buffers.values, size, width, buffers.news_columns, stride);
  transpose(buffers.grad_rows, buffers.values, size, width, buffers.grad_columns, 2 * stride);
  SmallProduct<Scalar> p{
      size,  0, width, buffers.grad_rows, buffers.values, 1, buffers.news_columns, stride, buffers.grad_raw,
      stride};
  multiply_lower(p);
  if (shape.delta) {
    p.a += size * buffers.values;
    p.c += size * stride;
    multiply_lower(p);
    transpose(p.a, buffers.values, size, width, buffers.grad_columns + stride, 2 * stride);
  }
  add_grad_raw(shape, given, h, buffers);
  for (int64_t i = 0; i < size; ++i) buffers.dots_q[i] = buffers.dots_k[i] = buffers.dots_end[i] = 0;
  if (start != nullptr) add_grad_of_reads(shape, size, start, buffers);
  if (end != nullptr) add_grad_of_writes(shape, size, end, buffers);
  const Scalar grad_whole =
      start == nullptr || end == nullptr ? Scalar(0) : whole * dot_states(shape, start, end, buffers.read);
  write_numbers(shape, given, h, grad_whole, buffers);
  if (given.grad_start != nullptr) write_grad_start(shape, given, h, whole, buffers);
}

// Writes the gradients of q and k, from those of q k^T and k k^T.
template <class Scalar>
void write_keys(const RecurrenceShape<Scalar>& shape, const RecurrenceBackward<Scalar>& given,
                Buffers<Scalar>& buffers) {
  const int64_t size = given.rows.size, stride = buffers.tokens;
  const Scalar* keys = buffers.rows + size * buffers.keys;
  const auto add = [&](const Scalar* rows, const Scalar* weights, Scalar* to) {
    multiply(SmallProduct<Scalar>{shape.key_dim, size, size, rows, 1, buffers.keys, weights, stride, to,
                                  stride, to, Scalar(1)});
  };
  transpose(buffers.sum_q, stride, size, size, buffers.transposed, stride);
  add(keys, buffers.transposed, buffers.grad_q);
  add(buffers.rows, buffers.sum_q, buffers.grad_k);
  if (shape.delta) {
    transpose(buffers.sum_k, stride, size, size, buffers.transposed, stride);
    add_row(Scalar(1), buffers.sum_k, size * stride, buffers.transposed);
    add(keys, buffers.transposed, buffers.grad_k);
  }
  for (int64_t d = 0; d < shape.key_dim; ++d) {
    for (int64_t i = 0; i < size; ++i) buffers.grad_q[d * stride + i] *= shape.scale;
  }
  transpose(buffers.grad_q, stride, shape.key_dim, size, given.grad_q, shape.key_stride);
  transpose(buffers.grad_k, stride, shape.key_dim, size, given.grad_k, shape.key_stride);
}

template <class Scalar>
void backward(const RecurrenceShape<Scalar>& shape, const RecurrenceBackward<Scalar>& given,
              Scalar* scratch) {
  Buffers<Scalar> buffers(shape, scratch);
  const int64_t size = given.rows.size;
  load_rows(shape, given.rows, false, buffers);
  transpose(buffers.rows, buffers.keys, size, shape.key_dim, buffers.columns_q, buffers.tokens);
  for (int64_t i = 0; i < size * buffers.tokens; ++i) buffers.sum_q[i] = buffers.sum_k[i] = 0;
  for (int64_t i = 0; i < shape.key_dim * buffers.tokens; ++i) buffers.grad_q[i] = buffers.grad_k[i] = 0;
  for (int64_t h = 0; h < shape.num_heads; ++h) backward_head(shape, given, h, buffers);
  write_keys(shape, given, buffers);
}

template <class Scalar>
int64_t scratch(const RecurrenceShape<Scalar>& shape) {
  return Buffers<Scalar>(shape, nullptr).used;
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
