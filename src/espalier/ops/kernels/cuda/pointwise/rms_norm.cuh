// SPDX-License-Identifier: Apache-2.0
// Root mean square norm of rows, and its gradients: the formulas of kernels/cpu/pointwise/row_math_loops.h.
//   y = w round(x r), r = 1 / sqrt(mean(x^2) + eps);
//   dx = r (g w - n mean(g w n)), n = x r, plus the gradient of the sum;  dw = sum over rows of g n.
//
// Threads: a row has a team of threads, a power of two from 8 to 512, such that each holds at most kHeld
// vectors of it (16 bytes; single elements if the width is not a multiple). Small teams share blocks of 128
// threads. Longer rows are read twice, the second time from cache.
//
// Memory: one pass over every tensor; inputs are kept packed in registers (4 kHeld per tensor) until the
// row's sum is known.
//
// Sums in float32 (float64): per thread in order, then over the team by butterfly shuffles, then over warps
// in order.
//
// dw: a team processes rows begin + i teams, i = 0, 1, ..., and adds them in that order, each thread its
// columns, in shared memory (width numbers per team, laid out so that adjacent threads access adjacent 16
// bytes). The block's teams are added in order into one partial sum; a second kernel adds these in float64,
// in 32 strands and then the strands. The assignment of rows to blocks depends only on sizes.
#pragma once

#include "espalier/ops/kernels/cpu/pointwise/row_math.h"
#include "espalier/ops/kernels/cuda/vectors.cuh"

namespace espalier::cuda {

constexpr int kMaxTeam = 512;
constexpr int kHeld = 4;

/// The distribution of rows of a given width over threads.
struct RowTeams {
  bool vectors;
  int team;     // threads
  int threads;  // of a block
  ESPALIER_SHARED_CODE int per_block() const { return threads / team; }
};

template <class Element>
RowTeams row_teams(int64_t width) {
  RowTeams result{width % kVectorSize<Element> == 0, 8, 128};
  const int64_t chunks = result.vectors ? width / kVectorSize<Element> : width;
  while (result.team < kMaxTeam && chunks > int64_t{kHeld} * result.team) result.team *= 2;
  result.threads = result.team > result.threads ? result.team : result.threads;
  if (result.team == 64) result.threads = 64;
  return result;
}

template <class Element>
struct RmsNormWork {
  RmsNormForward<Element> norm;
  int64_t num_rows;
  RowTeams teams;
};

/// A thread's team and index in it.
struct Member {
  int team, member;
};
ESPALIER_KERNEL Member member_of(const RowTeams& teams) {
  return {simt::thread() / teams.team, simt::thread() & (teams.team - 1)};
}

template <int N, class Element>
ESPALIER_KERNEL AccumulatorOf<Element> add_squares(const Vector<Element, N>& x,
                                                   AccumulatorOf<Element> squares) {
  AccumulatorOf<Element> upcast_x[N];
  upcast<Element, N>(x, upcast_x);
  for (int i = 0; i < N; ++i) squares += upcast_x[i] * upcast_x[i];
  return squares;
}

template <int N, class Element>
ESPALIER_KERNEL Vector<Element, N> added(const Vector<Element, N>& a, const Vector<Element, N>& b) {
  AccumulatorOf<Element> left[N], right[N];
  upcast<Element, N>(a, left);
  upcast<Element, N>(b, right);
  for (int i = 0; i < N; ++i) left[i] += right[i];
  return narrow<Element, N>(left);
}

template <int N, class Element>
ESPALIER_KERNEL Vector<Element, N> normalised(const Vector<Element, N>& x, const Vector<Element, N>& weight,
                                              AccumulatorOf<Element> inverse) {
  AccumulatorOf<Element> upcast_x[N], factor[N];
  upcast<Element, N>(x, upcast_x);
  upcast<Element, N>(weight, factor);
  for (int i = 0; i < N; ++i) upcast_x[i] *= inverse;
  upcast<Element, N>(narrow<Element, N>(upcast_x), upcast_x);
  for (int i = 0; i < N; ++i) upcast_x[i] *= factor[i];
  return narrow<Element, N>(upcast_x);
}

/// Shared memory: 32 numbers of the accumulator.
template <class Element, int N>
ESPALIER_KERNEL void rms_norm_kernel(const RmsNormWork<Element>& work) {
  using Scalar = AccumulatorOf<Element>;
  const RmsNormForward<Element>& norm = work.norm;
  const int size = work.teams.team;
  const auto [team, member] = member_of(work.teams);
  const int64_t row = int64_t{simt::block_x()} * work.teams.per_block() + team;
  const bool exists = row < work.num_rows;
  const int chunks = exists ? static_cast<int>(norm.width / N) : 0;
  const Element* x = norm.x + row * norm.width;
  const Element* addend = norm.addend == nullptr ? nullptr : norm.addend + row * norm.width;
  Element* sum = addend == nullptr ? nullptr : norm.sum + row * norm.width;

  Vector<Element, N> held[kHeld], other[kHeld];
  for (int h = 0; h < kHeld; ++h) {
    const int chunk = member + h * size;
    if (chunk < chunks) {
      held[h] = load<N>(x + chunk * N);
      if (addend != nullptr) other[h] = load<N>(addend + chunk * N);
    }
  }
  Scalar squares = 0;
  for (int h = 0; h < kHeld; ++h) {
    const int chunk = member + h * size;
    if (chunk < chunks) {
      if (addend != nullptr) {
        held[h] = added<N>(held[h], other[h]);
        store<N>(sum + chunk * N, held[h]);
      }
      squares = add_squares<N>(held[h], squares);
    }
  }
  for (int chunk = member + kHeld * size; chunk < chunks; chunk += size) {
    Vector<Element, N> rest = load<N>(x + chunk * N);
    if (addend != nullptr) {
      rest = added<N>(rest, load<N>(addend + chunk * N));
      store<N>(sum + chunk * N, rest);
    }
    squares = add_squares<N>(rest, squares);
  }

  squares = team_sum(squares, size, reinterpret_cast<Scalar*>(simt::shared()));
  const Scalar mean = squares / static_cast<Scalar>(norm.width) + static_cast<Scalar>(norm.eps);
  const Scalar inverse = Scalar(1) / std::sqrt(mean);
  if (exists && member == 0) norm.inverse_rms[row] = inverse;

  Element* y = norm.y + row * norm.width;
  for (int h = 0; h < kHeld; ++h) {
    const int chunk = member + h * size;
    if (chunk < chunks) {
      store<N>(y + chunk * N, normalised<N>(held[h], load<N>(norm.weight + chunk * N), inverse));
    }
  }
  const Element* again = addend == nullptr ? x : sum;
  for (int chunk = member + kHeld * size; chunk < chunks; chunk += size) {
    store<N>(y + chunk * N,
             normalised<N>(load<N>(again + chunk * N), load<N>(norm.weight + chunk * N), inverse));
  }
}

template <class Element>
struct RmsNormBackwardWork {
  RmsNormBackward<Element> norm;
  int64_t num_rows;
  RowTeams teams;
  int rows_per_team;
  AccumulatorOf<Element>* partials;  // [blocks, width], or null

  ESPALIER_SHARED_CODE int64_t rows_per_block() const { return int64_t{rows_per_team} * teams.per_block(); }
  int64_t blocks() const { return (num_rows + rows_per_block() - 1) / rows_per_block(); }
};

/// Two buffers of team_sum, then the sums of weight gradients.
template <class Scalar>
constexpr int64_t kTeamBufferBytes = 64 * sizeof(Scalar);

template <class Element>
int64_t backward_shared_bytes(const RmsNormBackwardWork<Element>& work) {
  using Scalar = AccumulatorOf<Element>;
  return kTeamBufferBytes<Scalar> + (work.partials == nullptr ? 0
                                                              : work.norm.width * work.teams.per_block() *
                                                                    static_cast<int64_t>(sizeof(Scalar)));
}

/// Enough blocks for any GPU, few enough partial sums, and few enough rows per team for accurate float32
/// sums.
template <class Element>
RmsNormBackwardWork<Element> backward_work(const RmsNormBackward<Element>& norm, int64_t num_rows,
                                           AccumulatorOf<Element>* partials) {
  constexpr int64_t kThreads = 1 << 17, kMaxRows = 256;
  const RowTeams teams = row_teams<Element>(norm.width);
  const int64_t num_teams = kThreads / teams.team;
  int64_t rows = (num_rows + num_teams - 1) / num_teams;
  rows = rows < 1 ? 1 : rows > kMaxRows ? kMaxRows : rows;
  return {norm, num_rows, teams, static_cast<int>(rows), partials};
}

/// The sums of a team: N numbers for each chunk of the row, in vectors of 16 bytes of which the first ones of
/// all chunks come first.
template <class Scalar, int N>
struct TeamSums {
  static constexpr int kSize = N == 1 ? 1 : kVectorSize<Scalar>;
  Scalar* sums;
  int chunks;

  ESPALIER_KERNEL int place(int chunk, int i) const {
    return (i / kSize * chunks + chunk) * kSize + i % kSize;
  }
  ESPALIER_KERNEL void clear(int chunk) const {
    for (int i = 0; i < N; ++i) sums[place(chunk, i)] = 0;
  }
  ESPALIER_KERNEL void add(int chunk, const Scalar (&terms)[N]) const {
    for (int i = 0; i < N; i += kSize) {
      Scalar* own = sums + place(chunk, i);
      Scalar part[kSize];
      load_scalars<kSize>(own, part);
      for (int k = 0; k < kSize; ++k) part[k] += terms[i + k];
      store<kSize>(own, narrow<Scalar, kSize>(part));
    }
  }
};

/// One chunk of a row, upcast.
template <class Element, int N>
struct GradientPiece {
  AccumulatorOf<Element> grad[N], normalised[N];

  ESPALIER_KERNEL GradientPiece(const Vector<Element, N>& g, const Vector<Element, N>& x,
                                AccumulatorOf<Element> inverse) {
    upcast<Element, N>(g, grad);
    upcast<Element, N>(x, normalised);
    for (int i = 0; i < N; ++i) normalised[i] *= inverse;
  }
  /// Converts grad to the gradient before the weight.
  ESPALIER_KERNEL void apply_weight(const Element* weight) {
    AccumulatorOf<Element> factor[N];
    upcast<Element, N>(load<N>(weight), factor);
    for (int i = 0; i < N; ++i) grad[i] *= factor[i];
  }
  ESPALIER_KERNEL AccumulatorOf<Element> product() const {
    AccumulatorOf<Element> sum = 0;
    for (int i = 0; i < N; ++i) sum += grad[i] * normalised[i];
    return sum;
  }
  ESPALIER_KERNEL void products(AccumulatorOf<Element> (&out)[N]) const {
    for (int i = 0; i < N; ++i) out[i] = grad[i] * normalised[i];
  }
  /// The gradient of x, plus the gradient of the sum, if any.
  ESPALIER_KERNEL Vector<Element, N> grad_x(AccumulatorOf<Element> mean, AccumulatorOf<Element> inverse,
                                            const Element* joins) const {
    AccumulatorOf<Element> out[N];
    for (int i = 0; i < N; ++i) out[i] = (grad[i] - normalised[i] * mean) * inverse;
    if (joins != nullptr) {
      AccumulatorOf<Element> more[N];
      upcast<Element, N>(load<N>(joins), more);
      for (int i = 0; i < N; ++i) out[i] += more[i];
    }
    return narrow<Element, N>(out);
  }
};

/// Shared memory: backward_shared_bytes.
template <class Element, int N>
ESPALIER_KERNEL void rms_norm_backward_kernel(const RmsNormBackwardWork<Element>& work) {
  using Scalar = AccumulatorOf<Element>;
  const RmsNormBackward<Element>& norm = work.norm;
  const int size = work.teams.team, teams = work.teams.per_block();
  const auto [team, member] = member_of(work.teams);
  const int row_chunks = static_cast<int>(norm.width / N);
  auto* buffers = reinterpret_cast<Scalar*>(simt::shared());
  auto* all_sums = reinterpret_cast<Scalar*>(simt::shared() + kTeamBufferBytes<Scalar>);
  const TeamSums<Scalar, N> sums{all_sums + team * norm.width, row_chunks};
  if (work.partials != nullptr) {
    for (int chunk = member; chunk < row_chunks; chunk += size) sums.clear(chunk);
  }

  const int64_t first = int64_t{simt::block_x()} * work.rows_per_block() + team;
  for (int r = 0; r < work.rows_per_team; ++r) {
    const int64_t row = first + int64_t{r} * teams;
    const bool exists = row < work.num_rows;
    const int chunks = exists ? row_chunks : 0;
    const Element* x = norm.x + row * norm.width;
    const Element* grad = norm.grad_y + row * norm.width;
    Vector<Element, N> held_x[kHeld], held_grad[kHeld];
    for (int h = 0; h < kHeld; ++h) {
      const int chunk = member + h * size;
      if (chunk < chunks) {
        held_x[h] = load<N>(x + chunk * N);
        held_grad[h] = load<N>(grad + chunk * N);
      }
    }
    const Scalar inverse = exists ? norm.inverse_rms[row] : 0;
    Scalar product = 0;
    const auto visit = [&](int chunk, const Vector<Element, N>& g, const Vector<Element, N>& v) {
      GradientPiece<Element, N> own(g, v, inverse);
      if (work.partials != nullptr) {
        Scalar terms[N];
        own.products(terms);
        sums.add(chunk, terms);
      }
      own.apply_weight(norm.weight + chunk * N);
      product += own.product();
    };
    for (int h = 0; h < kHeld; ++h) {
      const int chunk = member + h * size;
      if (chunk < chunks) visit(chunk, held_grad[h], held_x[h]);
    }
    for (int chunk = member + kHeld * size; chunk < chunks; chunk += size) {
      visit(chunk, load<N>(grad + chunk * N), load<N>(x + chunk * N));
    }
    if (norm.grad_x == nullptr) continue;
    const Scalar mean = team_sum(product, size, buffers + r % 2 * 32) / static_cast<Scalar>(norm.width);
    const Element* joins = norm.grad_sum == nullptr ? nullptr : norm.grad_sum + row * norm.width;
    Element* out = norm.grad_x + row * norm.width;
    const auto finish = [&](int chunk, const Vector<Element, N>& g, const Vector<Element, N>& v) {
      GradientPiece<Element, N> own(g, v, inverse);
      own.apply_weight(norm.weight + chunk * N);
      store<N>(out + chunk * N, own.grad_x(mean, inverse, joins == nullptr ? nullptr : joins + chunk * N));
    };
    for (int h = 0; h < kHeld; ++h) {
      const int chunk = member + h * size;
      if (chunk < chunks) finish(chunk, held_grad[h], held_x[h]);
    }
    for (int chunk = member + kHeld * size; chunk < chunks; chunk += size) {
      finish(chunk, load<N>(grad + chunk * N), load<N>(x + chunk * N));
    }
  }
  if (work.partials == nullptr) return;
  simt::sync_block();
  Scalar* partial = work.partials + int64_t{simt::block_x()} * norm.width;
  for (int column = simt::thread(); column < norm.width; column += work.teams.threads) {
    Scalar sum = 0;
    for (int t = 0; t < teams; ++t) sum += all_sums[t * norm.width + sums.place(column / N, column % N)];
    partial[column] = sum;
  }
}

template <class Scalar>
struct PartialSumsWork {
  const Scalar* partials;  // [num_partials, width]
  int64_t num_partials;
  int64_t width;
  Scalar* sum;  // [width]
};

/// 1,024 threads, 32 columns a block; shared memory: 32 x 33 float64.
template <class Scalar>
ESPALIER_KERNEL void sum_partials_kernel(const PartialSumsWork<Scalar>& work) {
  auto* strands = reinterpret_cast<double*>(simt::shared());
  const int lane = simt::lane(), strand = simt::thread() / 32;
  const int64_t column = int64_t{simt::block_x()} * 32 + lane;
  double sum = 0;
  if (column < work.width) {
    for (int64_t p = strand; p < work.num_partials; p += 32) sum += work.partials[p * work.width + column];
  }
  strands[strand * 33 + lane] = sum;
  simt::sync_block();
  if (strand != 0 || column >= work.width) return;
  sum = 0;
  for (int s = 0; s < 32; ++s) sum += strands[s * 33 + lane];
  work.sum[column] = static_cast<Scalar>(sum);
}

}  // namespace espalier::cuda
