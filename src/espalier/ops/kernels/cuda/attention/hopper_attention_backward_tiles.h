// SPDX-License-Identifier: Apache-2.0
// Shared by the kernels of backward attention on Hopper (hopper_attention_backward.h): tiles, data movement,
// and operations of a thread on scores.
#pragma once

#include "espalier/ops/kernels/cuda/attention/hopper_attention.h"
#include "espalier/ops/kernels/cuda/attention/key_parts.h"

namespace espalier::cuda::hopper {

struct BackwardParams {
  simt::TensorMap q;         // boxes: tiles of queries
  simt::TensorMap grad_out;  // likewise
  KeyMaps keys;
  AttentionProblem problem;
  AttentionGradients gradients;
  TileSchedule schedule;   // its query blocks are tiles
  const KeyPlace* places;  // by key block
  HeadPacking packing;
  KeyParts parts;
  // Scratch, by [head set of all heads, tile]:
  float* statistics;  // lse log2(e) of the tile's rows, infinite for missing tokens; then delta
  float* grad_q;      // null if deterministic; sums without the factor c, in accumulator order
                      // (BackwardTiles::grad_q_place)
};

template <class ElementType, int kDim>
struct BackwardTiles {
  using Element = ElementType;
  static constexpr int kHeadDim = kDim;
  static constexpr bool kLarge = kDim > 128;
  static constexpr int kKeys = kLarge ? 64 : 128;  // of a block of threads
  static constexpr int kRows = kDim == 64 ? 128 : 64;
  static constexpr int kStages = 2;
  static constexpr int kGradScoreStages = kLarge ? 1 : 2;
  static constexpr int kKeyBytes = kKeys * kDim * 2;
  static constexpr int kRowBytes = kRows * kDim * 2;
  static constexpr int kStatisticBytes = kRows * 4;
  static constexpr int kGradScoreBytes = kKeys * kRows * 2;
  static constexpr int kGradQFloats = kRows * kDim;

  // Offsets in shared memory.
  static constexpr int kK = 0;
  static constexpr int kV = kK + kKeyBytes;
  static constexpr int kQ = kV + kKeyBytes;
  static constexpr int kGradOut = kQ + kStages * kRowBytes;
  static constexpr int kGradScores = kGradOut + kStages * kRowBytes;
  // dQ for the adding warp, or P for the other warpgroup.
  static constexpr int kHandedOver = kGradScores + kGradScoreStages * kGradScoreBytes;
  static constexpr int kLse = kHandedOver + 4 * (kLarge ? kKeys * kRows : kGradQFloats);
  static constexpr int kDelta = kLse + kStages * kStatisticBytes;
  static constexpr int kBarriers = kDelta + kStages * kStatisticBytes;
  static constexpr int kSharedBytes = kBarriers + 8 * (4 * kStages + 1);

  /// Number of dQ accumulators per thread of a warpgroup,
  static constexpr int kGradQSums = kGradQFloats / (2 * simt::kWarpgroupSize);
  /// and the offset of elements from 4 v on of a thread of warpgroup `group`.
  static ESPALIER_SHARED_CODE int grad_q_place(int group, int v, int thread) {
    return ((group * (kGradQSums / 4) + v) * simt::kWarpgroupSize + thread) * 4;
  }
  /// First row and column of a warpgroup's part of dQ.
  static ESPALIER_SHARED_CODE int grad_q_row(int group) { return kDim == 64 ? 64 * group : 0; }
  static ESPALIER_SHARED_CODE int grad_q_column(int group) { return kDim == 64 ? 0 : kDim / 2 * group; }

  /// Number of threads per gradient of keys,
  static constexpr int kKeySumThreads = kLarge ? simt::kWarpgroupSize : kConsumers;
  /// and the offset of elements from 4 v on of such a thread in a part's sums.
  static ESPALIER_SHARED_CODE int key_sums_place(int v, int thread) {
    return (v * kKeySumThreads + thread) * 4;
  }
};

struct alignas(8) Floats2 {
  float values[2];
};

/// mbarriers of a thread block, in shared memory.
template <class Tiles>
struct BackwardBarriers {
  uint64_t* keys;
  uint64_t* q_full;
  uint64_t* q_empty;
  uint64_t* grad_out_full;
  uint64_t* grad_out_empty;

  ESPALIER_KERNEL explicit BackwardBarriers(std::byte* shared)
      : keys(reinterpret_cast<uint64_t*>(shared + Tiles::kBarriers)),
        q_full(keys + 1),
        q_empty(q_full + Tiles::kStages),
        grad_out_full(q_empty + Tiles::kStages),
        grad_out_empty(grad_out_full + Tiles::kStages) {}

  ESPALIER_KERNEL void init() const {
    simt::init_barrier(keys, 1);
    for (int s = 0; s < Tiles::kStages; ++s) {
      simt::init_barrier(q_full + s, 1);
      simt::init_barrier(q_empty + s, kConsumerWarps);
      simt::init_barrier(grad_out_full + s, 1);
      simt::init_barrier(grad_out_empty + s, kConsumerWarps);
    }
    simt::fence_barriers();
  }
};

/// The part assigned to this thread block.
ESPALIER_KERNEL KeyPart own_part(const BackwardParams& params) {
  return params.parts.order[simt::block_x()];
}
ESPALIER_KERNEL KeyBlock own_block(const BackwardParams& params) {
  return params.schedule.key_blocks[own_part(params).block].block;
}

/// The steps of a thread block: the tiles that see its key block, head set by head set.
struct BackwardSteps {
  int32_t set;  // of all heads
  int32_t tile;
  int32_t left;
  int32_t first_tile;
  int32_t end_tile;

  ESPALIER_KERNEL explicit BackwardSteps(const BackwardParams& params) {
    const KeyPart own = own_part(params);
    const SeeingTiles tiles =
        SeeingTiles::of(params.schedule.key_blocks[own.block].block, params.schedule.inputs.sizes.queries);
    const StepRange range = own.range(params.packing.sets * tiles.count());
    const int32_t sets_before = range.begin / tiles.count();
    set = own.head * params.packing.sets + sets_before;
    tile = tiles.first + range.begin - sets_before * tiles.count();
    left = range.end - range.begin;
    first_tile = tiles.first;
    end_tile = tiles.end;
  }

  ESPALIER_KERNEL bool done() const { return left == 0; }
  ESPALIER_KERNEL void advance() {
    --left;
    if (++tile < end_tile) return;
    tile = first_tile;
    ++set;
  }
  /// Index among all tiles of all sets.
  ESPALIER_KERNEL int64_t number(const BackwardParams& params) const {
    return int64_t{set} * params.schedule.inputs.num_query_blocks() + tile;
  }
};

/// By one thread.
template <class Tiles>
ESPALIER_KERNEL void load_backward(const BackwardParams& params) {
  constexpr int kRows = Tiles::kRows, kDim = Tiles::kHeadDim;
  const KeyPart own = own_part(params);
  std::byte* shared = simt::shared();
  const BackwardBarriers<Tiles> barriers(shared);
  const KeyPlace from = params.places[own.block];
  params.keys.acquire(from.rectangle);
  simt::arrive_expecting(barriers.keys, 2 * Tiles::kKeyBytes);
  load_tile<Tiles::kKeys, kDim>(shared + Tiles::kK, params.keys.keys(from.rectangle), barriers.keys, own.head,
                                from.token);
  load_tile<Tiles::kKeys, kDim>(shared + Tiles::kV, params.keys.values(from.rectangle), barriers.keys,
                                own.head, from.token);
  RingPlace<Tiles::kStages> place;
  ESPALIER_ONE_BY_ONE
  for (BackwardSteps step(params); !step.done(); step.advance()) {
    const int stage = place.stage, head = step.set << params.packing.shift;
    const int token = step.tile * params.packing.tokens(kRows);
    const float* statistics = params.statistics + step.number(params) * (2 * kRows);
    const auto load = [&](uint64_t* full, uint64_t* empty, const simt::TensorMap* map, std::byte* rows,
                          const float* from, std::byte* to) {
      simt::wait_phase(empty + stage, place.parity ^ 1);
      simt::arrive_expecting(full + stage, Tiles::kRowBytes + Tiles::kStatisticBytes);
      load_tile<kRows, kDim>(rows + stage * Tiles::kRowBytes, map, full + stage, head, token);
      simt::load_bytes(to + stage * Tiles::kStatisticBytes, from, Tiles::kStatisticBytes, full + stage);
    };
    load(barriers.q_full, barriers.q_empty, &params.q, shared + Tiles::kQ, statistics, shared + Tiles::kLse);
    load(barriers.grad_out_full, barriers.grad_out_empty, &params.grad_out, shared + Tiles::kGradOut,
         statistics + kRows, shared + Tiles::kDelta);
    place.advance();
  }
}

/// A thread's view of its keys: rows accumulator_row() and 8 below of the block; with 64 keys both warpgroups
/// have the same rows.
template <class Tiles>
class KeyRows {
 public:
  using Element = typename Tiles::Element;
  static constexpr int kRows = Tiles::kRows;
  static constexpr int kDim = Tiles::kHeadDim;

  ESPALIER_KERNEL KeyRows(const BackwardParams& params, const KeyBlock& block)
      : params_(params), scale_(params.problem.softmax_scale * kLog2E) {
    for (int i = 0; i < 2; ++i) seers_[i] = Seers::of(block, params.problem.subtree_end, first_row() + 8 * i);
    full_begin_ = block.full_begin;
    full_end_ = block.num_keys() == Tiles::kKeys ? block.full_end : 0;
  }

  static ESPALIER_KERNEL int first_row() { return accumulator_row() % Tiles::kKeys; }

  /// S to P, for the tile of queries starting at `token`.
  ESPALIER_KERNEL void exponentiate(float (&s)[kRows / 2], const float* lse, int32_t token) const {
    if (full_begin_ <= token && token + params_.packing.tokens(kRows) <= full_end_) {
      exponentiate<false>(s, lse, token);
    } else {
      exponentiate<true>(s, lse, token);
    }
  }

  /// dP to dS.
  static ESPALIER_KERNEL void differentiate(float (&dp)[kRows / 2], const float (&p)[kRows / 2],
                                            const float* delta) {
    ESPALIER_UNROLL
    for (int j = 0; j < kRows / 8; ++j) {
      const Floats2 own = *reinterpret_cast<const Floats2*>(delta + 8 * j + 2 * (simt::lane() % 4));
      ESPALIER_UNROLL
      for (int i = 0; i < 4; ++i) {
        float& x = dp[4 * j + i];
        x = p[4 * j + i] * (x - own.values[i % 2]);
      }
    }
  }
  /// Keys by queries, in slabs.
  static ESPALIER_KERNEL void write_grad_scores(std::byte* to, const uint32_t (&ds)[kRows / 16][4]) {
    const int row = first_row() / 16 * 16 + simt::lane() % 16;
    const int written = simt::slab_offset(row, simt::lane() / 16);
    ESPALIER_UNROLL
    for (int s = 0; s < kRows / 16; ++s) {
      // Chunk 2 s + lane / 16: within a slab the chunk's number is exclusive-ored.
      simt::put_matrices(to + s / 4 * (Tiles::kKeys * simt::kSlabRowBytes) + (written ^ s % 4 << 5), ds[s]);
    }
  }

  /// Stores the sums of this thread block. Re-reads its part from memory to save registers.
  static ESPALIER_KERNEL void store(const BackwardParams& params, KeyGradient gradient,
                                    const Sums<kDim>& sums) {
    const KeyPart own = own_part(params);
    if (own.parts == 1) {
      store(params, own.block, own.head, gradient, sums);
      return;
    }
    float* to = params.parts.sums_of(own.head, params.parts.cuts[own.block].first + own.part, gradient);
    ESPALIER_UNROLL
    for (int part = 0; part < std::ssize(sums); ++part) {
      ESPALIER_UNROLL
      for (int v = 0; v < std::ssize(sums[part]) / 4; ++v) {
        const float* from = sums[part] + 4 * v;
        *vector_of(to, part, v) = {from[0], from[1], from[2], from[3]};
      }
    }
  }

  /// Adds the results of store() of parts [first, first + parts) of a head, and stores the total.
  static ESPALIER_KERNEL void join(const BackwardParams& params, int32_t block, int32_t head,
                                   const KeyCut& cut, KeyGradient gradient) {
    Sums<kDim> sums;
    clear(sums);
    ESPALIER_ONE_BY_ONE
    for (int32_t i = 0; i < cut.parts; ++i) {
      const float* from = params.parts.sums_of(head, cut.first + i, gradient);
      ESPALIER_UNROLL
      for (int part = 0; part < std::ssize(sums); ++part) {
        ESPALIER_UNROLL
        for (int v = 0; v < std::ssize(sums[part]) / 4; ++v) {
          const Floats4 four = *vector_of(from, part, v);
          ESPALIER_UNROLL
          for (int e = 0; e < 4; ++e) sums[part][4 * v + e] += four.values[e];
        }
      }
    }
    store(params, block, head, gradient, sums);
  }

 private:
  template <class Float>
  static ESPALIER_KERNEL auto vector_of(Float* sums, int part, int v) {
    using Vector = std::conditional_t<std::is_const_v<Float>, const Floats4, Floats4>;
    const int own = part * (part_columns(kDim) / 8) + v;
    return reinterpret_cast<Vector*>(sums +
                                     Tiles::key_sums_place(own, simt::thread() % Tiles::kKeySumThreads));
  }
  static ESPALIER_KERNEL void store(const BackwardParams& params, int32_t index, int32_t head,
                                    KeyGradient gradient, const Sums<kDim>& sums) {
    const KeyBlock block = params.schedule.key_blocks[index].block;
    const KeyGradients& gradients = params.gradients.grad_sources[block.segment + 1];
    const bool is_keys = gradient == KeyGradient::kOfKeys;
    const TokenHeadsData& to = is_keys ? gradients.grad_k : gradients.grad_v;
    const float factor = is_keys ? params.problem.softmax_scale : 1.0F;
    ESPALIER_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = first_row() + 8 * i;
      if (row < block.num_keys()) store_row<Element>(to, block.begin + row, head, i, sums, factor);
    }
  }

  template <bool kMasked>
  ESPALIER_KERNEL void exponentiate(float (&s)[kRows / 2], const float* lse, int32_t token) const {
    SeenRows seen[2];
    if constexpr (kMasked) {
      for (int i = 0; i < 2; ++i) seen[i] = SeenRows::of(seers_[i], token, params_.packing, kRows);
    }
    ESPALIER_UNROLL
    for (int j = 0; j < kRows / 8; ++j) {
      const Floats2 own = *reinterpret_cast<const Floats2*>(lse + 8 * j + 2 * (simt::lane() % 4));
      ESPALIER_UNROLL
      for (int i = 0; i < 4; ++i) {
        float& x = s[4 * j + i];
        x = x * scale_ - own.values[i % 2];
        if constexpr (kMasked) x = seen[i / 2].include(8 * j + i % 2) ? x : -INFINITY;
        x = simt::exp2(x);
      }
    }
  }

  const BackwardParams& params_;
  float scale_;
  int32_t full_begin_;  // queries that see all keys of a full block
  int32_t full_end_;
  Seers seers_[2];
};

}  // namespace espalier::cuda::hopper
