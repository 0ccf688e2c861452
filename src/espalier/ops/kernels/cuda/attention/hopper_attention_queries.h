// SPDX-License-Identifier: Apache-2.0
// Gradients of queries on Hopper for deterministic backward passes:
//
//   dQ = c dS K,  dS = P * (dO V^T - delta),  P = exp(c Q K^T - lse)
//
// (docs/math.md, "Attention by tiles"). A thread block has one tile of 128 rows of queries and walks the
// tiles of keys that any row sees, as in forward: two warpgroups with 64 rows each and dQ in registers; one
// warp of a third loads. dS stays in registers as operand of the next product.
//
//                  head dimension 64        128       256
//   keys of a tile              128        128        64
//   registers a thread: dQ, S, dP  32, 64, 64 | 64, 64, 64 | 128, 32, 32
//   stages of K, V             4, 4        2, 2     2, 1
//   shared memory, Q and dO too  160        192      224 KB
#pragma once

#include "espalier/ops/kernels/cuda/attention/hopper_attention_backward.h"
#include "espalier/ops/kernels/cuda/attention/hopper_attention_forward.h"

namespace espalier::cuda::hopper {

struct QueryGradientParams {
  simt::TensorMap q;         // boxes of a tile
  simt::TensorMap grad_out;  // likewise
  simt::TensorMap grad_q;    // of a warpgroup's rows
  KeyMaps keys;
  AttentionProblem problem;
  AttentionGradients gradients;
  TileSchedule schedule;   // its query blocks are tiles
  const KeyPlace* places;  // by key block
  const int32_t* ends;     // by key block and key: one past the last query that sees it
  HeadPacking packing;
  TileOrder order;
  const float* statistics;  // from BackwardParams, with the same packing,
  int32_t statistics_rows;  // rows per tile of statistics,
  int32_t num_statistics;   // tiles of statistics per head set
};

template <class ElementType, int kDim>
struct QueryGradientTiles {
  using Element = ElementType;
  static constexpr int kHeadDim = kDim;
  static constexpr int kRows = 128;
  static constexpr int kKeys = kDim > 128 ? 64 : 128;
  static constexpr int kStages = kDim == 64 ? 4 : 2;
  static constexpr int kValueStages = kDim > 128 ? 1 : kStages;
  static constexpr int kQueryBytes = kRows * kDim * 2;
  static constexpr int kKeyBytes = kKeys * kDim * 2;
  static constexpr int kEndBytes = kKeys * 4;

  // Shared memory, by offsets.
  static constexpr int kQ = 0;
  static constexpr int kGradOut = kQ + kQueryBytes;
  static constexpr int kK = kGradOut + kQueryBytes;
  static constexpr int kV = kK + kStages * kKeyBytes;
  static constexpr int kEnds = kV + kValueStages * kKeyBytes;
  static constexpr int kNotes = kEnds + kStages * kEndBytes;
  static constexpr int kBarriers = kNotes + kStages * 16;
  static constexpr int kSharedBytes = kBarriers + 8 * (2 * kStages + 2 * kValueStages + 2);
};

/// By one thread.
template <class Tiles>
ESPALIER_KERNEL void load_query_gradients(const QueryGradientParams& params) {
  const ForwardBarriers<Tiles> barriers(simt::shared());
  const OwnTile own = tile_at(params, simt::block_x());
  const int head = own.set << params.packing.shift;
  const int32_t token = params.schedule.query_begin(own.tile);
  simt::arrive_expecting(barriers.q, 2 * Tiles::kQueryBytes);
  load_tile<Tiles::kRows, Tiles::kHeadDim>(simt::shared() + Tiles::kQ, &params.q, barriers.q, head, token);
  load_tile<Tiles::kRows, Tiles::kHeadDim>(simt::shared() + Tiles::kGradOut, &params.grad_out, barriers.q,
                                           head, token);
  KeyRings<Tiles> rings;
  load_key_tiles(params, own, barriers, rings, [] {});
}

/// One of 256 threads: rows 16 warp + lane / 4 and 8 more of the tile.
template <class Tiles>
class QueryGradientConsumer {
 public:
  using Element = typename Tiles::Element;
  static constexpr int kKeys = Tiles::kKeys;
  static constexpr int kDim = Tiles::kHeadDim;

  ESPALIER_KERNEL explicit QueryGradientConsumer(const QueryGradientParams& params)
      : params_(params),
        shared_(simt::shared()),
        group_(simt::warp() / 4),
        scale_(params.problem.softmax_scale * kLog2E) {
    const OwnTile own = tile_at(params, simt::block_x());
    const int32_t begin = params.schedule.query_begin(own.tile);
    ESPALIER_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = accumulator_row() + 8 * i;
      query_[i] = begin + params.packing.tokens(row);
      lse_[i] = INFINITY;
      delta_[i] = 0;
      if (query_[i] >= params.problem.num_tokens) continue;
      const int rows = params.statistics_rows, tile_row = row % rows;
      const int64_t tile = begin / params.packing.tokens(rows) + row / rows;
      const float* statistics =
          params.statistics + (own.set * int64_t{params.num_statistics} + tile) * (2 * rows) + tile_row;
      lse_[i] = statistics[0];
      delta_[i] = statistics[rows];
    }
    clear(grad_q_);
  }

  ESPALIER_KERNEL void run() {
    const ForwardBarriers<Tiles> barriers(shared_);
    simt::wait_phase(barriers.q, 0);
    RingPlace<Tiles::kStages> place;
    RingPlace<Tiles::kValueStages> value_place;
    bool more = true;
    ESPALIER_ONE_BY_ONE
    while (more) {
      more = step(barriers, place, value_place);
      place.advance();
      value_place.advance();
    }
    store();
  }

 private:
  /// Settles their sum, which is cheaper than settling each.
  static ESPALIER_KERNEL void settle_all(const float (&p)[kKeys / 2]) {
    float sums[4] = {0, 0, 0, 0};
    ESPALIER_UNROLL
    for (int i = 0; i < kKeys / 2; ++i) sums[i % 4] += p[i];
    simt::settle(sums[0] + sums[1] + (sums[2] + sums[3]));
  }

  /// Returns whether there is another tile.
  ESPALIER_KERNEL bool step(const ForwardBarriers<Tiles>& barriers, const RingPlace<Tiles::kStages>& place,
                            const RingPlace<Tiles::kValueStages>& value_place) {
    const int stage = place.stage, value_stage = value_place.stage;
    const std::byte* k = shared_ + Tiles::kK + stage * Tiles::kKeyBytes;
    float p[kKeys / 2], ds[kKeys / 2];
    simt::wait_phase(barriers.k_full + stage, place.parity);
    const TileNote note = reinterpret_cast<const TileNote*>(shared_ + Tiles::kNotes)[stage];
    simt::fence_products();
    multiply_rows<Element, Tiles::kRows, kKeys, kDim>(p, shared_ + Tiles::kQ, 64 * group_, k);
    simt::commit_products();
    simt::wait_phase(barriers.v_full + value_stage, value_place.parity);
    simt::fence_products();
    multiply_rows<Element, Tiles::kRows, kKeys, kDim>(ds, shared_ + Tiles::kGradOut, 64 * group_,
                                                      shared_ + Tiles::kV + value_stage * Tiles::kKeyBytes);
    simt::commit_products();
    simt::wait_products<1>();
    simt::hold(p);
    ESPALIER_UNROLL
    for (int i = 0; i < kKeys / 2; ++i) p[i] = p[i] * scale_ - lse_[i / 2 % 2];
    if (note.masked) {
      const auto* ends = reinterpret_cast<const int32_t*>(shared_ + Tiles::kEnds + stage * Tiles::kEndBytes);
      mask_scores<kKeys>(p, note, ends, query_);
    }
    ESPALIER_UNROLL
    for (int i = 0; i < kKeys / 2; ++i) p[i] = simt::exp2(p[i]);
    settle_all(p);
    simt::wait_products<0>();
    simt::hold(ds);
    release_stage(barriers.v_empty + value_stage);
    ESPALIER_UNROLL
    for (int i = 0; i < kKeys / 2; ++i) ds[i] = p[i] * (ds[i] - delta_[i / 2 % 2]);
    uint32_t rounded[kKeys / 16][4];
    round_sums<Element>(rounded, ds);
    simt::fence_products();
    multiply_add_registers<Element, kKeys>(grad_q_, rounded, k);
    simt::commit_products();
    simt::wait_products<0>();
    hold_parts(grad_q_);
    hold_all(rounded);
    release_stage(barriers.k_empty + stage);
    return !note.last;
  }

  ESPALIER_KERNEL void store() const {
    const OwnTile own = tile_at(params_, simt::block_x());
    const float scale = params_.problem.softmax_scale;
    // Q's rows of this warpgroup are no longer used.
    store_rows<Element, Tiles::kRows>(
        &params_.grad_q, own.set << params_.packing.shift,
        params_.schedule.query_begin(own.tile) + params_.packing.tokens(kRowsOfWarpgroup * group_),
        shared_ + Tiles::kQ, group_, kRowsWritten + group_, grad_q_, {scale, scale});
  }

  const QueryGradientParams& params_;
  std::byte* shared_;
  int group_;
  float scale_;
  int32_t query_[2];
  float lse_[2];
  float delta_[2];
  Sums<kDim> grad_q_;
};

/// params.order.blocks() blocks of kThreads threads; after prepare_backward, whose statistics it reads.
template <class Element, int kHeadDim>
ESPALIER_KERNEL void backward_queries(const QueryGradientParams& params) {
  using Tiles = QueryGradientTiles<Element, kHeadDim>;
  const int warp = simt::warp();
  if (simt::thread() == 0) ForwardBarriers<Tiles>(simt::shared()).init();
  simt::sync_block();
  if (warp >= kConsumerWarps) {
    simt::shrink_registers<kMoverRegisters>();
    if (warp == kConsumerWarps && simt::lane() == 0) load_query_gradients<Tiles>(params);
  } else {
    simt::grow_registers<kConsumerRegisters>();
    QueryGradientConsumer<Tiles>(params).run();
  }
}

}  // namespace espalier::cuda::hopper
