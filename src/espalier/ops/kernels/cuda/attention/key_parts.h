// SPDX-License-Identifier: Apache-2.0
// Backward passes by key blocks: which blocks are cut, and in what order they are worked on.
//
// The keys that open a forest are seen by everything after them, and one block of threads for each key block
// would still walk through all queries after the others are done. So a long key block is cut into parts, each
// of which takes a range of its steps, (head set, tile of queries) pairs. No part is longer than
//
//   limit = max(least_steps, ceil(steps of all key blocks / spare_parts))
//
// whence there are at most spare_parts more parts than key blocks, and fewer than 2 spare_parts parts of
// blocks that are cut: grids and memory are bounded before the forest is known. What parts of one block sum
// is added up part by part afterwards: the same bits in every run.
//
// Long parts come first, so that short ones fill the end, and parts of different heads alternate, of so many
// heads at a time as the second-level cache has room for. The order: by size class, the number of bits of a
// part's steps, the largest first; within a class by group of heads; within a group by steps, of equal ones
// by key block; and at last by head.
//
// One kernel, a warp per key block, which looks at 32 blocks at a time. Integer work only: the same order in
// every run.
#pragma once

#include "espalier/ops/kernels/cuda/attention/tile_schedule.h"

namespace espalier::cuda {

/// How finely key blocks are cut for a GPU. A part reads its keys and values and writes its sums, and they
/// are read again: as much as some 6 steps.
struct CutRule {
  int32_t multiprocessors;
  int32_t least_steps = 8;
};

/// How key blocks are cut, and for which heads.
struct PartInputs {
  int32_t heads;           // key heads
  int32_t heads_at_once;   // that alternate
  int32_t steps_per_tile;  // steps of a key block for each tile of queries that sees it
  int32_t least_steps;     // no block is cut into shorter parts than about half of that
  int32_t spare_parts;     // of one head, at least 1

  static PartInputs of(int32_t heads, int32_t heads_at_once, int32_t steps_per_tile, const CutRule& rule) {
    // So that no part is longer than two thirds of what a multiprocessor has to do: by simulation as good as
    // shorter ones, which cost memory (key_parts_test.cpp).
    const int32_t parts = rule.multiprocessors * 3 / 2;
    return {heads, heads_at_once, steps_per_tile, rule.least_steps, parts / heads + 1};
  }
};

/// Steps [begin, end) of a key block are those of part `part`.
struct StepRange {
  int32_t begin;
  int32_t end;
};

/// What one block of threads works on.
struct alignas(16) KeyPart {
  int32_t block;  // -1: nothing
  int32_t head;
  int32_t part;
  int32_t parts;

  /// The first parts may have one step more than the last ones.
  ESPALIER_SHARED_CODE StepRange range(int32_t steps) const {
    const int32_t least = steps / parts, more = steps - parts * least;
    const int32_t begin = least * part + lesser(part, more);
    return {begin, begin + least + (part < more ? 1 : 0)};
  }
};

/// How a key block is cut: into one part, or into several, numbered from `first` on among the parts of all
/// blocks that are cut, of one head.
struct KeyCut {
  int32_t parts;
  int32_t first;
};

/// The most parts of blocks that are cut, of one head, where a block has up to `most_steps` steps.
inline int64_t most_cut_parts(const PartInputs& inputs, int32_t key_blocks, int64_t most_steps) {
  const int64_t of_block = (most_steps + inputs.least_steps - 1) / inputs.least_steps;
  return of_block < 2 ? 0 : std::min(2 * int64_t{inputs.spare_parts}, key_blocks * of_block);
}

enum class KeyGradient : uint8_t { kOfKeys, kOfValues };

/// Sums that a thread reads and writes at once.
struct alignas(16) Floats4 {
  float values[4];
};

/// Arrays in the GPU's memory.
struct KeyParts {
  PartInputs inputs;
  KeyPart* order;      // by block of threads; the last ones may be nothing
  KeyCut* cuts;        // by key block
  int64_t cut_parts;   // of blocks that are cut, of one head: so many at most
  int64_t key_floats;  // of a whole block's gradient
  float* sums;         // num_sums(), [head, part of a block that is cut, KeyGradient, key_floats]

  int64_t num_sums() const { return inputs.heads * cut_parts * 2 * key_floats; }

  ESPALIER_SHARED_CODE float* sums_of(int64_t head, int32_t part, KeyGradient gradient) const {
    const int64_t number = 2 * (head * cut_parts + part) + (gradient == KeyGradient::kOfKeys ? 0 : 1);
    return sums + number * key_floats;
  }
};

/// Blocks of threads: one for every part that there may be.
ESPALIER_SHARED_CODE int32_t part_blocks(const PartInputs& inputs, const ScheduleInputs& schedule) {
  return inputs.heads * (schedule.num_key_blocks() + inputs.spare_parts);
}

/// All but the sums.
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

/// Tiles of queries that see some key of a block: contiguous, from the first one on.
struct SeeingTiles {
  int32_t first;
  int32_t end;

  static ESPALIER_SHARED_CODE SeeingTiles of(const KeyBlock& block, int32_t tile_tokens) {
    return {block.query_begin / tile_tokens, (block.query_end - 1) / tile_tokens + 1};
  }
  ESPALIER_SHARED_CODE int32_t count() const { return end - first; }
};

/// Are the highest bits of two positive numbers the same one?
ESPALIER_SHARED_CODE bool same_size_class(int32_t a, int32_t b) {
  return (a ^ b) < (a & b);
}

/// How each key block is cut, by the warps of a kernel.
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

/// Warps of order_parts, in blocks of kScheduleThreads: one per key block, and one for what is left over.
inline int32_t part_warps(const TileSchedule& schedule) {
  return schedule.inputs.num_key_blocks() + 1;
}

/// After the kernels of the schedule.
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
