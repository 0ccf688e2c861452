// SPDX-License-Identifier: Apache-2.0
// Shared by the attention kernels for Hopper: tiles, rings of stages, and masks.
//
// Rows of a tile of queries are (token, query head) pairs of one key head, `packed` heads token by token: a
// TMA box. With short nodes, fewer pairs of a tile are masked, and gradients of keys are summed over heads
// inside the products. `packed` is a power of two that divides the group; the head sets of a group are
// processed one by one.
#pragma once

#include <cmath>
#include <vector>

#include "espalier/ops/kernels/cuda/attention/simt_hopper.h"
#include "espalier/ops/kernels/cuda/attention/tile_schedule.h"
#include "espalier/ops/kernels/cuda/attention/tree_attention.h"

namespace espalier::cuda::hopper {

using simt::Order;

constexpr int kConsumerWarps = 8;  // two warpgroups, warps 0 to 7
constexpr int kConsumers = 32 * kConsumerWarps;
constexpr int kThreads = kConsumers + simt::kWarpgroupSize;  // and one for data movement
constexpr int kConsumerRegisters = 240;
constexpr int kMoverRegisters = 24;
constexpr int kRowsOfWarpgroup = 64;
constexpr int64_t kElementBytes = 2;
constexpr float kLog2E = 1.4426950408889634F;
constexpr float kLn2 = 0.6931471805599453F;

/// The launch grid.
struct Grid {
  int x, y;
};

/// Maps a thread block to a tile of queries and a head set. Tiles are ordered by work, longest first, for
/// load balance; for each tile several head sets are interleaved, as many as fit the L2 cache with their
/// inputs.
struct TileOrder {
  int32_t tiles;
  int32_t sets;
  int32_t sets_at_once;

  struct Place {
    int32_t rank;  // of the tile
    int32_t set;   // of all heads
  };
  ESPALIER_SHARED_CODE Place operator[](int32_t block) const {
    const int32_t group = block / (tiles * sets_at_once), first = group * sets_at_once;
    const int32_t width = lesser(sets_at_once, sets - first), left = block - tiles * first;
    return {left / width, first + left % width};
  }
  ESPALIER_SHARED_CODE int32_t blocks() const { return tiles * sets; }
};

/// A work queue for thread blocks in global memory. Zero before and after a launch.
struct WorkCounter {
  int32_t taken;
  int32_t finished;

  ESPALIER_KERNEL int32_t next() { return simt::atomic_add(&taken, 1); }
  /// Called by every thread block once the queue is empty.
  ESPALIER_KERNEL void finish(int32_t workers) {
    if (simt::atomic_add(&finished, 1) == workers - 1) taken = finished = 0;
  }
};

/// The composition of rows of query tiles.
struct HeadPacking {
  int32_t shift;  // packed = 2^shift
  int32_t sets;   // head sets per key head

  /// Packs at most `most` heads.
  static HeadPacking of(int32_t group, int64_t most = 8) {
    constexpr int kMostShift = 3;
    int shift = 0;
    while (shift < kMostShift && group % (2 << shift) == 0 && 2 << shift <= most) ++shift;
    return {shift, group >> shift};
  }
  ESPALIER_SHARED_CODE int32_t packed() const { return 1 << shift; }
  /// Tokens per tile of `rows` rows.
  ESPALIER_SHARED_CODE int32_t tokens(int rows) const { return rows >> shift; }
};

/// Tensor maps of the forest's keys and values, with boxes of a tile of keys, and of each rectangle.
/// Rectangles have separate maps so that rows beyond their last key are zero-filled. There may be a thousand,
/// so they are in global memory.
struct KeyMaps {
  simt::TensorMap k;
  simt::TensorMap v;
  const simt::TensorMap* context;  // k and v of each rectangle

  /// The maps of rectangle `number`, or of the forest (-1). For the loading thread, after acquire(number).
  ESPALIER_KERNEL const simt::TensorMap* keys(int32_t number) const {
    return number < 0 ? &k : context + 2 * number;
  }
  ESPALIER_KERNEL const simt::TensorMap* values(int32_t number) const {
    return number < 0 ? &v : context + 2 * number + 1;
  }
  ESPALIER_KERNEL void acquire(int32_t number) const {
    if (number < 0) return;
    simt::acquire_map(keys(number));
    simt::acquire_map(values(number));
  }
};

/// The source of a key block.
struct KeyPlace {
  int32_t rectangle;  // -1: the forest
  int32_t token;      // within its map
};

/// One warp per key block, by block_x. Writes its KeyPlace and, if `ends` is not null, one past the last
/// query that sees each of its `keys` keys; 0 for missing keys.
ESPALIER_KERNEL void place_keys(const TileSchedule& schedule, int keys, KeyPlace* places, int32_t* ends) {
  const int index = simt::block_x();
  const KeyBlock block = schedule.key_blocks[index].block;
  const ContextRectangle* rectangles = schedule.inputs.rectangles;
  KeyPlace place{-1, block.begin};
  if (block.segment >= 0) {
    place.rectangle = find_last(0, schedule.inputs.num_rectangles, [&](int32_t r) {
      return rectangles[r].segment == block.segment && rectangles[r].key_begin <= block.begin &&
             block.begin < rectangles[r].key_end;
    });
    place.token = block.begin - rectangles[place.rectangle].key_begin;
  }
  if (simt::lane() == 0) places[index] = place;
  if (ends == nullptr) return;
  for (int c = simt::lane(); c < keys; c += simt::kWarpSize) {
    const bool exists = c < block.num_keys();
    ends[int64_t{index} * keys + c] = !exists              ? 0
                                      : block.segment >= 0 ? block.query_end
                                                           : schedule.inputs.subtree_end[block.begin + c];
  }
}

/// Normalises strides of dimensions of size 1, which are arbitrary in tensors but not in maps.
inline simt::TensorMap mapped(simt::MappedTensor tensor) {
  if (tensor.heads == 1) tensor.head_stride = tensor.columns;
  if (tensor.tokens == 1) tensor.token_stride = tensor.columns;
  return simt::make_map(tensor);
}

/// Host functions that create maps: for tiles of `rows` rows of queries, and for keys.
inline simt::TensorMap map_queries(const AttentionProblem& problem, const TokenHeadsData& data,
                                   const HeadPacking& packing, int rows) {
  return mapped({data.data, data.token_stride, data.head_stride, problem.head_dim, problem.num_heads,
                 problem.num_tokens, packing.packed(), packing.tokens(rows)});
}
/// For `tokens` tokens from `begin`.
inline simt::TensorMap map_keys(const AttentionProblem& problem, const TokenHeadsData& data, int32_t begin,
                                int32_t tokens, int box_tokens) {
  return mapped({static_cast<const uint16_t*>(data.data) + begin * data.token_stride, data.token_stride,
                 data.head_stride, problem.head_dim, problem.num_key_heads, tokens, 1, box_tokens});
}
/// For all rectangles, from sources on the host.
inline std::vector<simt::TensorMap> map_context(const AttentionProblem& problem, const KeySource* sources,
                                                int box_tokens) {
  std::vector<simt::TensorMap> maps;
  for (int32_t i = 0; i < problem.num_rectangles; ++i) {
    const ContextRectangle& r = problem.host_rectangles[i];
    const KeySource& source = sources[1 + r.segment];
    for (const TokenHeadsData& data : {source.k, source.v}) {
      maps.push_back(map_keys(problem, data, r.key_begin, r.key_end - r.key_begin, box_tokens));
    }
  }
  return maps;
}

/// Position of step `i` in a ring of kStages stages: its stage, and the parity of the phase that completes
/// when it is filled. The phase that must complete before it is filled has the other parity.
template <int kStages>
struct RingPlace {
  int stage = 0;
  int parity = 0;

  ESPALIER_KERNEL void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// kRows rows of kColumns columns, as slabs.
template <int kRows, int kColumns>
ESPALIER_KERNEL void load_tile(std::byte* to, const simt::TensorMap* map, uint64_t* barrier, int head,
                               int token) {
  ESPALIER_UNROLL
  for (int c = 0; c < kColumns; c += simt::kSlabColumns) {
    simt::load_box(to + kRows * 2 * c, map, barrier, c, head, token);
  }
}

/// D = A B^T: 64 rows of A from `row`, all kRowsB rows of B, summed over kColumns columns.
template <class Element, int kRowsA, int kRowsB, int kColumns>
ESPALIER_KERNEL void multiply_rows(float (&d)[kRowsB / 2], const std::byte* a, int row, const std::byte* b) {
  const simt::Slabs<kRowsA> slabs_a(a);
  const simt::Slabs<kRowsB> slabs_b(b);
  ESPALIER_UNROLL
  for (int c = 0; c < kColumns; c += 16) {
    simt::multiply_async<Element, kRowsB, Order::kSummed, Order::kSummed>(
        d, slabs_a.summed_columns(row, c), slabs_b.summed_columns(0, c), c > 0);
  }
}

/// D += A B: A [64, kRowsB] in registers, 16 columns at a time; sums over rows of B. Each part of D's columns
/// is a separate product.
template <class Element, int kRowsB, int kParts, int kSums>
ESPALIER_KERNEL void multiply_add_registers(float (&d)[kParts][kSums], const uint32_t (&a)[kRowsB / 16][4],
                                            const std::byte* b, bool add = true) {
  const simt::Slabs<kRowsB> slabs_b(b);
  ESPALIER_UNROLL
  for (int part = 0; part < kParts; ++part) {
    ESPALIER_UNROLL
    for (int r = 0; r < kRowsB; r += 16) {
      simt::multiply_async<Element, 2 * kSums, Order::kKept>(
          d[part], a[r / 16], slabs_b.summed_rows(r, part * (2 * kSums)), add || r > 0);
    }
  }
}

/// Columns per product, for `columns` that exceed the maximum of the instruction.
constexpr int part_columns(int columns) {
  return columns < 128 ? columns : 128;
}
/// A thread's accumulators for 64 rows of kColumns columns.
template <int kColumns>
using Sums = float[kColumns / part_columns(kColumns)][part_columns(kColumns) / 2];

template <int kParts, int kSums>
ESPALIER_KERNEL void clear(float (&sums)[kParts][kSums]) {
  ESPALIER_UNROLL
  for (int part = 0; part < kParts; ++part) {
    ESPALIER_UNROLL
    for (int i = 0; i < kSums; ++i) sums[part][i] = 0;
  }
}
template <int kParts, int kSums>
ESPALIER_KERNEL void hold_parts(float (&sums)[kParts][kSums]) {
  ESPALIER_UNROLL
  for (int part = 0; part < kParts; ++part) simt::hold(sums[part]);
}

/// Stores the thread's row `i` (0 or 1), times `factor`, to a row of a tensor.
template <class Element, int kParts, int kSums>
ESPALIER_KERNEL void store_row(const TokenHeadsData& to, int64_t token, int64_t head, int i,
                               const float (&sums)[kParts][kSums], float factor) {
  auto* out = static_cast<Element*>(to.data) + token * to.token_stride + head * to.head_stride +
              2 * (simt::lane() % 4);
  ESPALIER_UNROLL
  for (int part = 0; part < kParts; ++part) {
    ESPALIER_UNROLL
    for (int j = 0; j < kSums / 4; ++j) {
      *reinterpret_cast<uint32_t*>(out + part * (2 * kSums) + 8 * j) =
          simt::pack<Element>(sums[part][4 * j + 2 * i] * factor, sums[part][4 * j + 2 * i + 1] * factor);
    }
  }
}

/// This thread's first accumulator row, of the 128 of both warpgroups; its other row is 8 below.
ESPALIER_KERNEL int accumulator_row() {
  return simt::thread() / simt::kWarpSize * 16 + simt::lane() / 4;
}

/// Stores a warpgroup's 64 rows of accumulators, times the factors of each thread's two rows, to global
/// memory through `tile`: kRows rows in shared memory, of which rows [64 group, 64 group + 64) belong to this
/// warpgroup and are no longer used. The map's boxes have 64 rows. `barrier`: a free named barrier for the
/// warpgroup.
template <class Element, int kRows, int kParts, int kSums>
ESPALIER_KERNEL void store_rows(const simt::TensorMap* map, int head, int token, std::byte* tile, int group,
                                int barrier, const float (&sums)[kParts][kSums], const float (&factors)[2]) {
  constexpr int kSlabBytes = kRows * simt::kSlabRowBytes;
  const int written = simt::slab_offset(accumulator_row() / 16 * 16 + simt::lane() % 16, simt::lane() / 16);
  ESPALIER_UNROLL
  for (int part = 0; part < kParts; ++part) {
    ESPALIER_UNROLL
    for (int s = 0; s < kSums / 8; ++s) {
      uint32_t r[4];
      ESPALIER_UNROLL
      for (int m = 0; m < 4; ++m) {
        const float factor = factors[m % 2];
        r[m] =
            simt::pack<Element>(sums[part][8 * s + 2 * m] * factor, sums[part][8 * s + 2 * m + 1] * factor);
      }
      const int sixteen = part * (kSums / 8) + s;  // columns; four times that is a slab
      // Chunk 2 (sixteen % 4) + lane / 16: within a slab the chunk's number is exclusive-ored.
      simt::put_matrices(tile + sixteen / 4 * kSlabBytes + (written ^ sixteen % 4 << 5), r);
    }
  }
  simt::fence_copies();
  simt::sync_threads(barrier, simt::kWarpgroupSize);
  if (simt::thread() % simt::kWarpgroupSize != 0) return;
  ESPALIER_UNROLL
  for (int slab = 0; slab < kParts * kSums * 2 / simt::kSlabColumns; ++slab) {
    simt::store_box(map, tile + slab * kSlabBytes + kRowsOfWarpgroup * group * simt::kSlabRowBytes,
                    slab * simt::kSlabColumns, head, token);
  }
  simt::commit_writes();
  simt::wait_writes_read<0>();
}

/// Called by a warp that no longer needs a stage.
ESPALIER_KERNEL void release_stage(uint64_t* empty) {
  simt::sync_warp();  // reads of the stage by its lanes
  if (simt::lane() == 0) simt::arrive(empty);
}

/// Rounds accumulators of a warpgroup to operand A of the next product: 16 columns each.
template <class Element, int N>
ESPALIER_KERNEL void round_sums(uint32_t (&a)[N / 8][4], const float (&sums)[N]) {
  ESPALIER_UNROLL
  for (int s = 0; s < N / 8; ++s) {
    ESPALIER_UNROLL
    for (int m = 0; m < 4; ++m) a[s][m] = simt::pack<Element>(sums[8 * s + 2 * m], sums[8 * s + 2 * m + 1]);
  }
}

template <int N>
ESPALIER_KERNEL void hold_all(uint32_t (&registers)[N][4]) {
  ESPALIER_UNROLL
  for (int i = 0; i < N; ++i) simt::hold(registers[i]);
}

/// Queries [begin, end) to which a key is visible.
struct Seers {
  int32_t begin;
  int32_t end;

  static ESPALIER_KERNEL Seers of(const KeyBlock& block, const int32_t* subtree_end, int row) {
    if (row >= block.num_keys()) return {0, 0};
    if (block.segment >= 0) return {block.query_begin, block.query_end};
    return {block.begin + row, subtree_end[block.begin + row]};
  }
};

/// The rows of a tile of queries starting at `token` to which a key is visible, for the lane with rows 2
/// (lane % 4) + {0, 1} modulo 8.
struct SeenRows {
  int32_t begin;
  uint32_t length;

  static ESPALIER_KERNEL SeenRows of(const Seers& seers, int32_t token, const HeadPacking& packing,
                                     int rows) {
    const int32_t tokens = packing.tokens(rows);
    const int32_t begin = lesser(greater(seers.begin - token, 0), tokens) << packing.shift;
    const int32_t end = lesser(greater(seers.end - token, 0), tokens) << packing.shift;
    return {2 * (simt::lane() % 4) - begin, static_cast<uint32_t>(end - begin)};
  }
  /// `row` without the lane's 2 (lane % 4).
  ESPALIER_KERNEL bool include(int row) const { return static_cast<uint32_t>(row + begin) < length; }
};

}  // namespace espalier::cuda::hopper
