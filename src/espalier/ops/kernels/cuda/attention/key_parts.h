// SPDX-License-Identifier: Apache-2.0
// Partition and order of key blocks in backward passes.
//
// The first keys of a tree are visible to all later tokens, so with one thread block per key block, the first
// ones would run much longer than the others. Therefore long key blocks are cut into parts, each a range of
// its steps, (head set, tile of queries) pairs. A part has at most
//
//   limit = max(least_steps, ceil(steps of all key blocks / spare_parts))
//
// steps. So there are at most spare_parts more parts than key blocks, and fewer than 2 spare_parts parts of
// cut blocks: grids and memory are bounded independently of the forest. The sums of the parts of a block are
// added in order afterwards: bitwise reproducible.
//
// Long parts come first for load balance, and parts of different heads are interleaved, as many heads as fit
// the L2 cache. Sort keys: size class (bit length of the number of steps, descending), group of heads, steps,
// key block, head.
//
// One kernel with a warp per key block, which examines 32 blocks at a time. Integer arithmetic only:
// deterministic.
#pragma once

#include "espalier/ops/kernels/cuda/attention/tile_schedule.h"

namespace espalier::cuda {

/// Granularity of cutting key blocks for a GPU. The overhead of a part (reading keys and values, writing and
/// re-reading sums) equals about 6 steps.
struct CutRule {
  int32_t multiprocessors;
  int32_t least_steps = 8;
};

/// Parameters of the partition.
struct PartInputs {
  int32_t heads;           // key heads
  int32_t heads_at_once;   // interleaved key heads
  int32_t steps_per_tile;  // steps of a key block for each tile of queries that sees it
  int32_t least_steps;     // blocks are not cut into parts shorter than about half of this
  int32_t spare_parts;     // per head, at least 1

  static PartInputs of(int32_t heads, int32_t heads_at_once, int32_t steps_per_tile, const CutRule& rule) {
    // Limits parts to two thirds of the work per multiprocessor. In simulations as good as shorter parts,
    // which cost more memory (key_parts_test.cpp).
    const int32_t parts = rule.multiprocessors * 3 / 2;
    return {heads, heads_at_once, steps_per_tile, rule.least_steps, parts / heads + 1};
  }
};

/// Steps [begin, end) of a key block are those of part `part`.
struct StepRange {
  int32_t begin;
  int32_t end;
};

/// The work of one thread block.
struct alignas(16) KeyPart {
  int32_t block;  // -1: nothing
  int32_t head;
  int32_t part;
  int32_t parts;

  /// The first parts may have one more step than the last ones.
  ESPALIER_SHARED_CODE StepRange range(int32_t steps) const {
    const int32_t least = steps / parts, more = steps - parts * least;
    const int32_t begin = least * part + lesser(part, more);
    return {begin, begin + least + (part < more ? 1 : 0)};
  }
};

/// The parts of a key block: one, or several, numbered from `first` among the parts of all cut blocks of a
/// head.
struct KeyCut {
  int32_t parts;
  int32_t first;
};

/// Maximum number of parts of cut blocks per head, if blocks have up to `most_steps` steps.
inline int64_t most_cut_parts(const PartInputs& inputs, int32_t key_blocks, int64_t most_steps) {
  const int64_t block_parts = (most_steps + inputs.least_steps - 1) / inputs.least_steps;
  return block_parts < 2 ? 0 : std::min(2 * int64_t{inputs.spare_parts}, key_blocks * block_parts);
}

enum class KeyGradient : uint8_t { kOfKeys, kOfValues };

/// Four sums, accessed as one vector.
struct alignas(16) Floats4 {
  float values[4];
};

/// Arrays in the GPU's memory.
struct KeyParts {
  PartInputs inputs;
  KeyPart* order;      // by thread block; the last ones may be empty
  KeyCut* cuts;        // by key block
  int64_t cut_parts;   // maximum number of parts of cut blocks per head
  int64_t key_floats;  // floats per block gradient
  float* sums;         // num_sums(), [head, part of a block that is cut, KeyGradient, key_floats]

  int64_t num_sums() const { return inputs.heads * cut_parts * 2 * key_floats; }

  ESPALIER_SHARED_CODE float* sums_of(int64_t head, int32_t part, KeyGradient gradient) const {
    const int64_t number = 2 * (head * cut_parts + part) + (gradient == KeyGradient::kOfKeys ? 0 : 1);
    return sums + number * key_floats;
  }
};

/// Number of thread blocks: the maximum number of parts.
ESPALIER_SHARED_CODE int32_t part_blocks(const PartInputs& inputs, const ScheduleInputs& schedule) {
  return inputs.heads * (schedule.num_key_blocks() + inputs.spare_parts);
}

/// Places all arrays except the sums.
inline void place_parts(const PartInputs& inputs, const ScheduleInputs& schedule, int64_t key_floats,
                        Arena& arena, KeyParts* parts) {
  const int64_t most_steps = int64_t{schedule.num_query_blocks()} * inputs.steps_per_tile;
  parts->inputs = inputs;
  parts->cut_parts = most_cut_parts(inputs, schedule.num_key_blocks(), most_steps);
  parts->key_floats = key_floats;
  parts->sums = nullptr;
  arena.place(parts->order, part_blocks(inputs, schedule));
  arena.place(parts->cuts, schedule.num_key_blocks());
}

/// The contiguous range of tiles of queries that see a key of a block.
struct SeeingTiles {
  int32_t first;
  int32_t end;

  static ESPALIER_SHARED_CODE SeeingTiles of(const KeyBlock& block, int32_t tile_tokens) {
    return {block.query_begin / tile_tokens, (block.query_end - 1) / tile_tokens + 1};
  }
  ESPALIER_SHARED_CODE int32_t count() const { return end - first; }
};

/// Whether two positive numbers have the same bit length.
ESPALIER_SHARED_CODE bool same_size_class(int32_t a, int32_t b) {
  return (a ^ b) < (a & b);
}

/// Computes the partition of key blocks, per warp.
class KeyCutter {
 public:
  /// Steps of a block's longest part; 0 of none.
  struct Cut {
    int32_t parts;
    int32_t steps;
  };

  ESPALIER_KERNEL KeyCutter(const TileSchedule& schedule, const PartInputs& inputs)
      : schedule_(schedule), inputs_(inputs) {
    int64_t total = 0;
    for (int32_t i = simt::lane(); i < schedule.inputs.num_key_blocks(); i += simt::kWarpSize) {
      total += steps(i);
    }
    total = reduce_lanes(total, [](int64_t a, int64_t b) { return a + b; });
    limit_ = greater(inputs.least_steps,
                     static_cast<int32_t>((total + inputs.spare_parts - 1) / inputs.spare_parts));
  }

  ESPALIER_KERNEL Cut operator()(int32_t block) const {
    const int32_t all = steps(block), parts = (all + limit_ - 1) / limit_;
    return {parts, (all + parts - 1) / parts};
  }

 private:
  ESPALIER_KERNEL int32_t steps(int32_t block) const {
    const KeyBlock& keys = schedule_.key_blocks[block].block;
    return SeeingTiles::of(keys, schedule_.inputs.sizes.queries).count() * inputs_.steps_per_tile;
  }

  const TileSchedule& schedule_;
  const PartInputs& inputs_;
  int32_t limit_;
};

/// Warps of order_parts, in blocks of kScheduleThreads: one per key block, and one for the remainder.
inline int32_t part_warps(const TileSchedule& schedule) {
  return schedule.inputs.num_key_blocks() + 1;
}

/// Runs after the kernels of the schedule.
ESPALIER_KERNEL void order_parts(const TileSchedule& schedule, const KeyParts& parts) {
  const int32_t blocks = schedule.inputs.num_key_blocks(), heads = parts.inputs.heads;
  const int32_t index = simt::block_x() * kScheduleWarps + simt::warp();
  if (index > blocks) return;
  const KeyCutter cut(schedule, parts.inputs);
  const KeyCutter::Cut own = index < blocks ? cut(index) : KeyCutter::Cut{0, 0};
  int32_t larger = 0, alike = 0, before = 0, cut_before = 0;  // parts: of size classes, and those before own
  for (int32_t i = simt::lane(); i < blocks; i += simt::kWarpSize) {
    const KeyCutter::Cut other = cut(i);
    if (same_size_class(other.steps, own.steps)) {
      alike += other.parts;
      before += other.steps > own.steps || (other.steps == own.steps && i < index) ? other.parts : 0;
    } else {
      larger += other.steps > own.steps ? other.parts : 0;
    }
    cut_before += i < index && other.parts > 1 ? other.parts : 0;
  }
  larger = sum_lanes(larger), alike = sum_lanes(alike);
  before = sum_lanes(before), cut_before = sum_lanes(cut_before);
  if (index == blocks) {
    const int32_t end = part_blocks(parts.inputs, schedule.inputs);
    for (int32_t i = heads * larger + simt::lane(); i < end; i += simt::kWarpSize) {
      parts.order[i] = {-1, 0, 0, 1};
    }
    return;
  }
  if (simt::lane() == 0) parts.cuts[index] = {own.parts, cut_before};
  for (int32_t i = simt::lane(); i < own.parts * heads; i += simt::kWarpSize) {
    const int32_t part = i / heads, head = i % heads;
    const int32_t group = head / parts.inputs.heads_at_once * parts.inputs.heads_at_once;
    const int32_t width = lesser(parts.inputs.heads_at_once, heads - group);
    parts.order[heads * larger + group * alike + (before + part) * width + head - group] = {index, head, part,
                                                                                            own.parts};
  }
}

/// Orders the parts on `stream`, a cudaStream_t, after its schedule.
void order_parts(const TileSchedule& schedule, const KeyParts& parts, void* stream);

}  // namespace espalier::cuda
