// SPDX-License-Identifier: Apache-2.0
// Attention forward on mma.sync. With c = softmax_scale log2(e), key tile by key tile of what a query block
// sees (tile_schedule.h),
//     m' = max(m, max_j s_ij),  l' = 2^(c (m - m')) l + sum_j 2^(c (s_ij - m')),  O likewise,  s = Q K^T,
// in the end O / l and lse = ln(2) (c m + log2 l).
//
// A block of threads has one query block and `packed` heads (attention_tiles.h: RowPacking), kRows rows in
// all; x runs over query blocks, most work first, y over parts of the group, z over key heads, so that
// concurrent blocks read the same keys. A warp has kRows / kWarps of the rows and all kKeys columns of a
// tile: maxima and sums stay inside four lanes, and P stays in registers as operand of the second product. Q
// stays in shared memory. K and V have one buffer each: V is loaded during S, the next K during O; a second
// block on the multiprocessor hides the remaining latency. Full tiles have no mask arithmetic.
//
//   head_dim   rows x keys   warps   shared memory   accumulators in a thread (O + S)
//       64      128 x 64       4        32 KiB          64 + 64
//      128      128 x 64       4        64 KiB         128 + 64
//      256       64 x 64       4        96 KiB         128 + 32
//
// 32 rows per warp halve the shared memory reads of K and V; at 256, registers allow only 16. 64 keys rather
// than 128 because irregular trees waste half a tile on average.
// At 128 all 255 registers are used; on Hopper the compiler spills maxima, sums and some addresses across the
// products: 36 of 1,170 instructions of a full tile, 256 of which are products. Sums in float32, P rounded to
// the element. No atomics: bitwise reproducible.
#pragma once

#include "espalier/ops/kernels/cuda/attention/attention_tiles.h"

namespace espalier::cuda {

struct ForwardParams {
  TileSchedule schedule;
  const KeySource* sources;
  TokenHeadsData q;
  TokenHeadsData out;
  float* lse;  // [heads, tokens]
  RowPacking packing;
  int32_t group;
  float scale;  // softmax_scale, positive
};

template <class Element_, int kDim_>
struct ForwardTiles {
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr int kRows = kDim == 256 ? 64 : 128;
  static constexpr int kKeys = 64;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * simt::kWarpSize;
  static constexpr int kBlocks = 2;                        // target blocks per multiprocessor
  static constexpr int kRowTiles = kRows / (16 * kWarps);  // of 16, of a warp
  static constexpr int64_t kSharedBytes =
      (kRows + 2 * kKeys) * kDim * int64_t{sizeof(Element)} + (kKeys + kRows) * int64_t{sizeof(int32_t)};
};

template <class Tiles>
class ForwardBlock {
  using Element = typename Tiles::Element;
  static constexpr int kDim = Tiles::kDim, kRows = Tiles::kRows, kKeys = Tiles::kKeys;
  static constexpr int kThreads = Tiles::kThreads, kRowTiles = Tiles::kRowTiles;
  static constexpr int kKeyTiles = kKeys / 8, kDimTiles = kDim / 8;

 public:
  ESPALIER_KERNEL explicit ForwardBlock(const ForwardParams& params)
      : params_(params),
        query_block_(params.schedule.query_order[simt::block_x()]),
        query_begin_(params.schedule.query_begin(query_block_)),
        query_end_(params.schedule.query_end(query_block_)),
        head_begin_(simt::block_z() * params.group + simt::block_y() * params.packing.packed),
        warp_row_(simt::warp() * kRowTiles * 16) {}

  ESPALIER_KERNEL void run() {
    TileWalk walk(params_.schedule, query_block_);
    copy_queries();
    if (simt::thread() < kRows) tokens()[simt::thread()] = token(simt::thread());
    copy_block(keys(), source(walk.block()).k, walk.block());
    clear();
    while (!walk.done()) {
      const KeyMask mask(walk.block(), query_begin_, query_end_, kKeys);
      const TokenHeadsData v = source(walk.block()).v;
      simt::wait_copies<0>();
      simt::sync_block();  // K is there, and V is done with
      copy_block(values(), v, walk.block());
      int32_t end = 0;
      if (mask.needed && simt::thread() < kKeys) {
        end = KeyMask::end(walk.block(), params_.schedule.inputs.subtree_end, simt::thread());
      }
      walk.advance();
      scores_.clear();
      multiply_rows<kDim>(scores_, queries(), warp_row_, keys(), 0);
      if (mask.needed && simt::thread() < kKeys) ends()[simt::thread()] = end;
      simt::wait_copies<0>();
      simt::sync_block();  // V and the ends are there, and K is done with
      if (!walk.done()) {
        copy_block(keys(), source(walk.block()).k, walk.block());
      }
      if (mask.needed) hide_pairs(scores_, mask, tokens(), warp_row_, ends());
      normalise();
      multiply_columns<kKeys / 16, kDim>(
          out_, [&](uint32_t (&p)[4], int m, int step) { scores_.template round<Element>(p, m, step); },
          values(), 0);
    }
    finish();
  }

 private:
  ESPALIER_KERNEL Element* queries() const { return reinterpret_cast<Element*>(simt::shared()); }
  ESPALIER_KERNEL Element* keys() const { return queries() + kRows * kDim; }
  ESPALIER_KERNEL Element* values() const { return keys() + kKeys * kDim; }
  ESPALIER_KERNEL int32_t* ends() const { return reinterpret_cast<int32_t*>(values() + kKeys * kDim); }

  ESPALIER_KERNEL int32_t* tokens() const { return ends() + kKeys; }  // of rows

  ESPALIER_KERNEL const KeySource& source(const KeyBlock& block) const {
    return params_.sources[block.segment + 1];
  }
  ESPALIER_KERNEL void copy_block(Element* tile, const TokenHeadsData& from, const KeyBlock& block) const {
    copy_keys<kKeys, kDim, kThreads>(tile, from, simt::block_z(), block);
    simt::commit_copies();
  }

  ESPALIER_KERNEL int num_rows() const { return (query_end_ - query_begin_) * params_.packing.packed; }
  ESPALIER_KERNEL int32_t token(int row) const { return query_begin_ + params_.packing.token(row); }
  ESPALIER_KERNEL int64_t element_offset(const TokenHeadsData& tensor, int row) const {
    return token(row) * tensor.token_stride + (head_begin_ + params_.packing.head(row)) * tensor.head_stride;
  }
  /// The row of this lane in row tile m, upper or lower half.
  ESPALIER_KERNEL int row(int m, int half) const { return warp_row_ + 16 * m + 8 * half + simt::lane() / 4; }

  ESPALIER_KERNEL void copy_queries() {
    const auto* q = static_cast<const Element*>(params_.q.data);
    copy_rows<kRows, kDim, kThreads>(
        queries(), [&](int r) { return q + element_offset(params_.q, r); },
        [&](int r) { return r < num_rows(); });
  }

  ESPALIER_KERNEL void clear() {
    out_.clear();
    ESPALIER_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      ESPALIER_UNROLL
      for (int half = 0; half < 2; ++half) {
        maxima_[m][half] = -INFINITY;
        sums_[m][half] = 0;
      }
    }
  }

  /// Updates maxima, converts scores to P, and rescales sums and O.
  ESPALIER_KERNEL void normalise() {
    const float scale = params_.scale * kLog2E;
    ESPALIER_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      ESPALIER_UNROLL
      for (int half = 0; half < 2; ++half) {
        float maximum = maxima_[m][half];
        ESPALIER_UNROLL
        for (int n = 0; n < kKeyTiles; ++n) {
          maximum = fmaxf(maximum, fmaxf(scores_.at[m][n][2 * half], scores_.at[m][n][2 * half + 1]));
        }
        maximum = fmaxf(maximum, simt::shuffle_xor(maximum, 1));
        maximum = fmaxf(maximum, simt::shuffle_xor(maximum, 2));
        // Rows without a visible key so far keep sums of zero.
        const float offset = maximum == -INFINITY ? 0 : maximum * scale;
        const float factor = simt::exp2(maxima_[m][half] * scale - offset);
        maxima_[m][half] = maximum;
        float sum = sums_[m][half] * factor;
        ESPALIER_UNROLL
        for (int n = 0; n < kKeyTiles; ++n) {
          ESPALIER_UNROLL
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            scores_.at[m][n][i] = simt::exp2(scores_.at[m][n][i] * scale - offset);
            sum += scores_.at[m][n][i];
          }
        }
        sums_[m][half] = sum;
        ESPALIER_UNROLL
        for (int n = 0; n < kDimTiles; ++n) {
          out_.at[m][n][2 * half] *= factor;
          out_.at[m][n][2 * half + 1] *= factor;
        }
      }
    }
  }

  /// Stores O / l, through the warp's rows of Q in shared memory, and lse.
  ESPALIER_KERNEL void finish() {
    simt::sync_warp();  // its lanes are done with Q
    ESPALIER_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      ESPALIER_UNROLL
      for (int half = 0; half < 2; ++half) {
        float sum = sums_[m][half];
        sum += simt::shuffle_xor(sum, 1);
        sum += simt::shuffle_xor(sum, 2);
        const float factor = 1 / sum;
        ESPALIER_UNROLL
        for (int n = 0; n < kDimTiles; ++n) {
          out_.at[m][n][2 * half] *= factor;
          out_.at[m][n][2 * half + 1] *= factor;
        }
        const int r = row(m, half);
        if (simt::lane() % 4 == 0 && r < num_rows()) {
          const int64_t head = head_begin_ + params_.packing.head(r);
          params_.lse[head * params_.schedule.inputs.num_tokens + token(r)] =
              params_.scale * maxima_[m][half] + kLn2 * simt::log2(sum);
        }
      }
    }
    out_.template store<kDim>(queries(), warp_row_, 0, 1.0F);
    simt::sync_warp();
    store_rows<16 * kRowTiles, kDim>(
        queries(), warp_row_,
        [&](int r) { return static_cast<Element*>(params_.out.data) + element_offset(params_.out, r); },
        [&](int r) { return r < num_rows(); });
  }

  const ForwardParams& params_;
  int32_t query_block_, query_begin_, query_end_;
  int32_t head_begin_;
  int warp_row_;
  Accumulators<kRowTiles, kDimTiles> out_;
  Accumulators<kRowTiles, kKeyTiles> scores_;
  float maxima_[kRowTiles][2];
  float sums_[kRowTiles][2];  // over this lane's columns
};

inline AttentionGrid forward_grid(const ForwardParams& params, int32_t num_key_heads) {
  return {params.schedule.inputs.num_query_blocks(), params.packing.parts, num_key_heads};
}

template <class Tiles>
ESPALIER_KERNEL void attend_tile(const ForwardParams& params) {
  ForwardBlock<Tiles>(params).run();
}

}  // namespace espalier::cuda
