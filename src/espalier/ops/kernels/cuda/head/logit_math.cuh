// SPDX-License-Identifier: Apache-2.0
// Rows of float32 logits: log-sum-exp, log-probabilities at targets, and gradients.
//
// Threads: a block of 512 per row of a block of logits; a thread loads 4 vectors of 4 logits at a time (16
// registers), 512 x 16 adjacent logits per iteration.
//
// Forward: maximum and sum of exp(logit - maximum) in one pass (Milakov and Gimelshein, "Online normalizer
// calculation for softmax", 2018), per thread in float32, rescaled at most once every 16 logits; threads and
// blocks of logits are combined in float64.
//
// Backward: logits are read once and overwritten by gradients of half their size. In each iteration all
// threads read before any writes, and writes are below unread logits. Values at targets of edges are computed
// before the first iteration and written after the last.
//
// Differences logit - maximum (lse) are computed before scaling to base 2, because otherwise their error
// would grow with the logits. lse is subtracted in two float32 parts. The order of sums depends only on
// sizes. Work quadratic in the edges of a row (comparing their targets) is distributed over the threads.
#pragma once

#include <bit>
#include <cmath>

#include "espalier/ops/kernels/cuda/head/logit_math.h"
#include "espalier/ops/kernels/cuda/simt.h"

namespace espalier::cuda {

constexpr int kLogitThreads = 512;
constexpr int kLogitHeld = 4;
constexpr int64_t kLogitSharedBytes = 2 * 32 * sizeof(double);
constexpr float kLog2E = 1.44269504088896341F;

ESPALIER_KERNEL float exp_of(float x) {
  return simt::exp2(x * kLog2E);
}

/// The largest value of the block's threads; `buffer`: 32 numbers in shared memory, used once.
ESPALIER_KERNEL float block_maximum(float value, float* buffer) {
  for (int distance = 16; distance > 0; distance /= 2) {
    const float other = simt::shuffle_xor(value, distance);
    value = other > value ? other : value;
  }
  if (simt::lane() == 0) buffer[simt::thread() / 32] = value;
  simt::sync_block();
  for (int warp = 0; warp < kLogitThreads / 32; ++warp) value = buffer[warp] > value ? buffer[warp] : value;
  return value;
}

/// The sum over the block's threads, in a fixed order; `buffer`: 32 numbers in shared memory, used once.
ESPALIER_KERNEL double block_sum(double value, double* buffer) {
  for (int distance = 16; distance > 0; distance /= 2) value += simt::shuffle_xor(value, distance);
  if (simt::lane() == 0) buffer[simt::thread() / 32] = value;
  simt::sync_block();
  double sum = 0;
  for (int warp = 0; warp < kLogitThreads / 32; ++warp) sum += buffer[warp];
  return sum;
}

/// This thread's logits of one iteration; entries beyond the row are `beyond`.
struct HeldLogits {
  float values[kLogitHeld][4];

  ESPALIER_KERNEL HeldLogits(const float* row, int begin, int num_columns, float beyond) {
    for (int h = 0; h < kLogitHeld; ++h) {
      const int column = place(begin, h);
      if (column < num_columns) {
        const simt::Vector16 bits = simt::load_vector(row + column);
        for (int i = 0; i < 4; ++i) {
          values[h][i] = column + i < num_columns ? std::bit_cast<float>(bits.words[i]) : beyond;
        }
      } else {
        for (int i = 0; i < 4; ++i) values[h][i] = beyond;
      }
    }
  }
  ESPALIER_KERNEL static int place(int begin, int h) {
    return begin + (h * kLogitThreads + simt::thread()) * 4;
  }
};

constexpr int kLogitTurn = kLogitThreads * kLogitHeld * 4;

struct AddExpsWork {
  LogitBlockRows block;
  RowSums rows;
  bool is_first, is_last;
};

/// Maximum and sum of exponentials over this thread's part of the row.
struct ThreadSums {
  float maximum = -INFINITY, sum = 0;

  ESPALIER_KERNEL void add(const HeldLogits& held) {
    float largest = maximum;
    for (int h = 0; h < kLogitHeld; ++h) {
      for (int i = 0; i < 4; ++i) largest = held.values[h][i] > largest ? held.values[h][i] : largest;
    }
    if (largest == -INFINITY) return;  // nothing yet
    sum *= exp_of(maximum - largest);
    maximum = largest;
    for (int h = 0; h < kLogitHeld; ++h) {
      for (int i = 0; i < 4; ++i) sum += exp_of(held.values[h][i] - largest);
    }
  }
};

ESPALIER_KERNEL void add_exps_kernel(const AddExpsWork& work) {
  const LogitBlockRows& block = work.block;
  auto* buffers = reinterpret_cast<double*>(simt::shared());
  const int64_t row = simt::block_x();
  const float* logits = block.logits + row * block.stride;
  const int num_columns = static_cast<int>(block.num_columns);
  ThreadSums own;
  for (int begin = 0; begin < num_columns; begin += kLogitTurn) {
    own.add(HeldLogits(logits, begin, num_columns, -INFINITY));
  }

  float maximum = block_maximum(own.maximum, reinterpret_cast<float*>(buffers));
  double before = 0;
  if (!work.is_first) {
    const float last = work.rows.maximum[row];
    maximum = last > maximum ? last : maximum;
    before = work.rows.sum[row] * std::exp(static_cast<double>(last) - maximum);
  }
  const double scaled = own.sum * static_cast<double>(exp_of(own.maximum - maximum));
  const double sum = before + block_sum(scaled, buffers + 32);
  const double log_sum = work.is_last ? std::log(sum) : 0;

  for (int64_t e = block.edge_begin[row] + simt::thread(); e < block.edge_begin[row + 1];
       e += kLogitThreads) {
    const int64_t column = block.edge_target[e] - block.column_begin;
    float value = 0 <= column && column < num_columns ? logits[column] : work.rows.logprob[e];
    if (work.is_last) value = static_cast<float>((static_cast<double>(value) - maximum) - log_sum);
    work.rows.logprob[e] = value;
  }
  // All threads have read the row's sums before this one passed the barrier in block_sum.
  if (simt::thread() != 0) return;
  work.rows.maximum[row] = maximum;
  work.rows.sum[row] = sum;
  if (work.is_last) work.rows.lse[row] = maximum + log_sum;
}

struct DifferentiateWork {
  LogitBlockRows block;
  LogitGradients given;
};

/// softmax of a row, given its log-sum-exp.
struct Softmax {
  float lse, rest;

  ESPALIER_KERNEL explicit Softmax(double exact)
      : lse(static_cast<float>(exact)), rest(static_cast<float>(exact - lse)) {}
  ESPALIER_KERNEL float operator()(float logit) const { return exp_of((logit - lse) - rest); }
};

template <class Element>
ESPALIER_KERNEL void differentiate_kernel(const DifferentiateWork& work) {
  const LogitBlockRows& block = work.block;
  const LogitGradients& given = work.given;
  auto* buffers = reinterpret_cast<double*>(simt::shared());
  const int64_t row = simt::block_x();
  const float* logits = block.logits + row * block.stride;
  auto* out = reinterpret_cast<Element*>(block.logits + row * block.stride);
  const int num_columns = static_cast<int>(block.num_columns);
  const Softmax softmax(given.lse[row]);
  const int64_t begin = block.edge_begin[row], end = block.edge_begin[row + 1];
  const auto for_own_edges = [&](const auto& visit) {
    for (int64_t e = begin + simt::thread(); e < end; e += kLogitThreads) {
      const int64_t column = block.edge_target[e] - block.column_begin;
      if (0 <= column && column < num_columns) visit(e, column);
    }
  };

  double total = 0;
  for (int64_t e = begin + simt::thread(); e < end; e += kLogitThreads) total += given.edge_grad[e];
  const auto grad = static_cast<float>(block_sum(total, buffers));
  for_own_edges([&](int64_t e, int64_t column) {
    float value = -softmax(logits[column]) * grad;
    for (int64_t other = begin; other < end; ++other) {
      if (block.edge_target[other] == block.edge_target[e]) value += given.edge_grad[other];
    }
    given.edge_value[e] = value;
  });
  for (int first = 0; first < num_columns; first += kLogitTurn) {
    const HeldLogits held(logits, first, num_columns, 0);
    simt::sync_block();
    for (int h = 0; h < kLogitHeld; ++h) {
      const int column = HeldLogits::place(first, h);
      if (column >= num_columns) continue;
      float values[4];
      for (int i = 0; i < 4; ++i) values[i] = -softmax(held.values[h][i]) * grad;
      simt::store_pairs(out + column, simt::pack<Element>(values[0], values[1]),
                        simt::pack<Element>(values[2], values[3]));
    }
  }
  simt::sync_block();
  for_own_edges([&](int64_t e, int64_t column) {
    out[column].bits = static_cast<uint16_t>(simt::pack<Element>(given.edge_value[e], 0));
  });
}

}  // namespace espalier::cuda
