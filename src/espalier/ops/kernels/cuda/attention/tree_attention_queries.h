// SPDX-License-Identifier: Apache-2.0
// dQ on mma.sync for deterministic backward passes:
//
//   dQ = c dS K,  dS = P (dO V^T - delta),  P = exp(c Q K^T - lse)
//
// (docs/math.md, "Attention by tiles"). A thread block has one query block and follows its walk
// (tile_schedule.h) as in forward. S and dP are computed in addition to attend_keys
// (tree_attention_backward.h): 7 products instead of 5. Uses a separate schedule. Sums in float32.
#pragma once

#include "espalier/ops/kernels/cuda/attention/tree_attention_backward.h"

namespace espalier::cuda {

template <class Element_, int kDim_>
struct QueryGradientTiles {
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr int kRows = 64;
  static constexpr int kKeys = kDim == 256 ? 32 : 64;
  static constexpr int kWarps = kRows / 16;
  static constexpr int kThreads = kWarps * simt::kWarpSize;
  static constexpr int64_t kSharedBytes = (2 * kRows + 4 * kKeys) * kDim * int64_t{sizeof(Element)} +
                                          (2 * kKeys + kRows) * int64_t{sizeof(int32_t)};
};

/// A warp has 16 rows; dS stays in registers as operand of the product with K. K and V have two stages each;
/// one barrier per tile.
template <class Tiles>
class QueryGradientBlock {
  using Element = typename Tiles::Element;
  static constexpr int kDim = Tiles::kDim, kRows = Tiles::kRows, kKeys = Tiles::kKeys;
  static constexpr int kThreads = Tiles::kThreads, kKeyTiles = kKeys / 8;

 public:
  ESPALIER_KERNEL explicit QueryGradientBlock(const BackwardParams& params)
      : params_(params),
        query_block_(params.schedule.query_order[simt::block_x()]),
        rows_{params.packing, params.schedule.query_begin(query_block_),
              params.schedule.query_end(query_block_),
              simt::block_z() * params.group + simt::block_y() * params.packing.packed},
        warp_row_(simt::warp() * 16) {}

  ESPALIER_KERNEL void run() {
    TileWalk walk(params_.schedule, query_block_);
    copy_rows_of(queries(), params_.q);
    copy_rows_of(grad_out(), params_.grad_out);
    copy_block(walk.block(), 0);
    if (simt::thread() < kRows) tokens()[simt::thread()] = rows_.token(simt::thread());
    if (simt::thread() < kKeys) ends(0)[simt::thread()] = end(walk.block());
    load_row_data();
    sums_.clear();
    for (int stage = 0; !walk.done(); stage ^= 1) {
      simt::wait_copies<0>();
      simt::sync_block();  // the tile is there, and the other stage is done with
      const KeyMask mask(walk.block(), rows_.query_begin, rows_.query_end, kKeys);
      walk.advance();
      int32_t next_end = 0;
      if (!walk.done()) {
        copy_block(walk.block(), stage ^ 1);
        if (simt::thread() < kKeys) next_end = end(walk.block());
      }
      add_tile(mask, stage);
      if (!walk.done() && simt::thread() < kKeys) ends(stage ^ 1)[simt::thread()] = next_end;
    }
    simt::sync_warp();  // its lanes are done with Q
    sums_.template store<kDim>(queries(), warp_row_, 0, params_.scale);
    simt::sync_warp();
    store_rows<16, kDim>(
        queries(), warp_row_,
        [&](int r) { return static_cast<Element*>(params_.grad_q.data) + rows_.offset(params_.grad_q, r); },
        [&](int r) { return r < rows_.num_rows(); });
  }

 private:
  ESPALIER_KERNEL Element* queries() const { return reinterpret_cast<Element*>(simt::shared()); }
  ESPALIER_KERNEL Element* grad_out() const { return queries() + kRows * kDim; }
  ESPALIER_KERNEL Element* keys(int stage) const {
    return grad_out() + kRows * kDim + stage * 2 * kKeys * kDim;
  }
  ESPALIER_KERNEL Element* values(int stage) const { return keys(stage) + kKeys * kDim; }
  ESPALIER_KERNEL int32_t* ends(int stage) const {
    return reinterpret_cast<int32_t*>(keys(2)) + stage * kKeys;
  }
  ESPALIER_KERNEL int32_t* tokens() const { return ends(2); }

  ESPALIER_KERNEL int32_t end(const KeyBlock& block) const {
    return KeyMask::end(block, params_.schedule.inputs.subtree_end, simt::thread());
  }

  ESPALIER_KERNEL void copy_rows_of(Element* tile, const TokenHeadsData& tensor) {
    const auto* data = static_cast<const Element*>(tensor.data);
    copy_rows<kRows, kDim, kThreads>(
        tile, [&](int row) { return data + rows_.offset(tensor, row); },
        [&](int row) { return row < rows_.num_rows(); });
  }
  ESPALIER_KERNEL void copy_block(const KeyBlock& block, int stage) {
    const KeySource& source = params_.sources[block.segment + 1];
    copy_keys<kKeys, kDim, kThreads>(keys(stage), source.k, simt::block_z(), block);
    copy_keys<kKeys, kDim, kThreads>(values(stage), source.v, simt::block_z(), block);
    simt::commit_copies();
  }

  ESPALIER_KERNEL void load_row_data() {
    ESPALIER_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row_ + 8 * half + simt::lane() / 4;
      lse_[half] = delta_[half] = 0;
      if (row >= rows_.num_rows()) continue;
      const int64_t index = rows_.head(row) * params_.schedule.inputs.num_tokens + rows_.token(row);
      lse_[half] = params_.lse[index] * kLog2E;
      delta_[half] = params_.delta[index];
    }
  }

  /// dQ += dS K.
  ESPALIER_KERNEL void add_tile(const KeyMask& mask, int stage) {
    Accumulators<1, kKeyTiles> scores, grads;
    scores.clear();
    multiply_rows<kDim>(scores, queries(), warp_row_, keys(stage), 0);
    if (mask.needed) hide_pairs(scores, mask, tokens(), warp_row_, ends(stage));
    grads.clear();
    multiply_rows<kDim>(grads, grad_out(), warp_row_, values(stage), 0);
    const float scale = params_.scale * kLog2E;
    ESPALIER_UNROLL
    for (int n = 0; n < kKeyTiles; ++n) {
      ESPALIER_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float p = simt::exp2(scores.at[0][n][i] * scale - lse_[i / 2]);
        grads.at[0][n][i] = p * (grads.at[0][n][i] - delta_[i / 2]);
      }
    }
    multiply_columns<kKeys / 16, kDim>(
        sums_, [&](uint32_t (&a)[4], int m, int step) { grads.template round<Element>(a, m, step); },
        keys(stage), 0);
  }

  const BackwardParams& params_;
  int32_t query_block_;
  RowBlock rows_;
  int warp_row_;
  float lse_[2];
  float delta_[2];
  Accumulators<1, kDim / 8> sums_;
};

template <class Tiles>
ESPALIER_KERNEL void attend_queries(const BackwardParams& params) {
  QueryGradientBlock<Tiles>(params).run();
}

inline AttentionGrid queries_grid(const BackwardParams& params) {
  return {params.schedule.inputs.num_query_blocks(), params.packing.parts, params.num_heads / params.group};
}

}  // namespace espalier::cuda
