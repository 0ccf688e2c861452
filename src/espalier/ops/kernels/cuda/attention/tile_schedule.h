// SPDX-License-Identifier: Apache-2.0
// The tile schedule of a forest with context, computed on the GPU.
//
// A query block [b, e) sees key block c iff c.query_begin < e and b < c.query_end. In the order of
// query_begin (the order of forest blocks; context blocks are sorted by it, longer ones first) these are a
// contiguous range of blocks, from the one that contains b or the first that begins after b, preceded by a
// chain: because subtrees are nested, the predecessor of a block c in the chain is the nearest block before
// it whose query_end is not smaller than c's, independently of the queries. So the list of a query block is
// represented by the starts of range and chain, and one number per key block, `previous`: memory is linear in
// the number of blocks, and a walk reads only listed tiles. It goes from the diagonal to the root, first over
// blocks of the forest, then of the context.
//
// Conversely the query blocks that see a key block are the contiguous ones that intersect [query_begin,
// query_end).
//
// Query blocks are ordered by work, the number of (query, key) pairs of listed tiles, largest first, as in
// kernels/cpu/attention/schedule.h. Three kernels with a warp per block, which examines 32 blocks at a time:
// time is quadratic in the number of blocks; 8,192 x 8,192 blocks are 2 M warp steps. Integer arithmetic
// only: deterministic.
#pragma once

#include <algorithm>

#include "espalier/ops/kernels/cuda/simt.h"
#include "espalier/ops/kernels/key_block.h"

namespace espalier::cuda {

/// The inputs of a schedule. Pointers are to GPU memory.
struct ScheduleInputs {
  const int32_t* subtree_end;  // [num_tokens], of a forest in preorder
  int32_t num_tokens;
  // Ranges must not be empty; query ranges nested or disjoint; sorted by query_begin, ascending, then
  // query_end, descending.
  const ContextRectangle* rectangles;
  int32_t num_rectangles;
  int32_t num_context_blocks;  // sum of num_context_blocks(rectangle, sizes.keys)
  BlockSizes sizes;

  ESPALIER_SHARED_CODE int32_t num_query_blocks() const {
    return (num_tokens + sizes.queries - 1) / sizes.queries;
  }
  ESPALIER_SHARED_CODE int32_t num_forest_blocks() const {
    return (num_tokens + sizes.keys - 1) / sizes.keys;
  }
  ESPALIER_SHARED_CODE int32_t num_key_blocks() const { return num_forest_blocks() + num_context_blocks; }
};

/// A key block and the index of the next block in a walk, -1 for none. 32 bytes, one load.
struct alignas(16) ListedBlock {
  KeyBlock block;
  int32_t previous;
};

/// Key blocks of the forest, or of the context, for a query block: first to last (none if first is
/// kNoStretch), then from `chain` by `previous`; chain is -1 if empty.
struct KeyList {
  int32_t last;  // the chain where there is no stretch
  int32_t first;
  int32_t chain;
};
constexpr int32_t kNoStretch = 0x7fffffff;

struct QueryLists {
  KeyList forest;
  KeyList context;
};

/// Arrays of a schedule in the GPU's memory.
struct TileSchedule {
  ScheduleInputs inputs;
  ListedBlock* key_blocks;  // the forest's own in order, then the context's
  QueryLists* lists;        // by query block
  int64_t* query_work;      // pairs in the tiles of each query block
  int32_t* query_order;     // query blocks, most work first, then in order

  ESPALIER_SHARED_CODE int32_t query_begin(int32_t block) const { return block * inputs.sizes.queries; }
  ESPALIER_SHARED_CODE int32_t query_end(int32_t block) const {
    const int32_t begin = query_begin(block), left = inputs.num_tokens - begin;
    return begin + (left < inputs.sizes.queries ? left : inputs.sizes.queries);
  }
};

/// Bump allocator, aligned to 256 bytes as its base. With a null base it only computes the size.
class Arena {
 public:
  explicit Arena(void* memory) : memory_(static_cast<std::byte*>(memory)) {}

  template <class T>
  void place(T*& array, int64_t count) {
    array = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
  }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* memory_;
  int64_t bytes_ = 0;
};

inline void place_schedule(const ScheduleInputs& inputs, Arena& arena, TileSchedule* schedule) {
  schedule->inputs = inputs;
  arena.place(schedule->key_blocks, inputs.num_key_blocks());
  arena.place(schedule->lists, inputs.num_query_blocks());
  arena.place(schedule->query_work, inputs.num_query_blocks());
  arena.place(schedule->query_order, inputs.num_query_blocks());
}

/// Iterates over the key blocks that a query block sees.
class TileWalk {
 public:
  /// Starts at the first of them, which always exists: the last block that contains a query of the block.
  ESPALIER_KERNEL TileWalk(const TileSchedule& schedule, int32_t query_block)
      : schedule_(schedule), query_block_(query_block) {
    begin(schedule.lists[query_block].forest);
    load();
  }

  ESPALIER_KERNEL bool done() const { return index_ < 0; }
  ESPALIER_KERNEL int32_t index() const { return index_; }
  ESPALIER_KERNEL const KeyBlock& block() const { return now_; }

  ESPALIER_KERNEL void advance() {
    const bool in_forest = index_ < schedule_.inputs.num_forest_blocks();
    const int32_t next = index_ > first_ ? index_ - 1 : index_ == first_ ? chain_ : previous_;
    if (next < 0 && in_forest) {
      begin(schedule_.lists[query_block_].context);
    } else {
      index_ = next;
    }
    load();
  }

 private:
  ESPALIER_KERNEL void begin(const KeyList& list) {
    index_ = list.last;
    first_ = list.first;
    chain_ = list.chain;
  }

  ESPALIER_KERNEL void load() {
    if (done()) return;
    const ListedBlock listed = schedule_.key_blocks[index_];
    now_ = listed.block;
    previous_ = listed.previous;
  }

  const TileSchedule& schedule_;
  int32_t query_block_;
  int32_t first_;
  int32_t chain_;
  int32_t index_;
  int32_t previous_ = -1;
  KeyBlock now_{};
};

// Kernels -------------------------------------------------------------------------------------------------

constexpr int kScheduleThreads = 128;
constexpr int kScheduleWarps = kScheduleThreads / simt::kWarpSize;

inline int32_t schedule_grid(int32_t warps) {
  return (warps + kScheduleWarps - 1) / kScheduleWarps;
}

ESPALIER_SHARED_CODE int32_t lesser(int32_t a, int32_t b) {
  return a < b ? a : b;
}
ESPALIER_SHARED_CODE int32_t greater(int32_t a, int32_t b) {
  return a < b ? b : a;
}

template <class T, class Join>
ESPALIER_KERNEL T reduce_lanes(T value, const Join& join) {
  for (int mask = 16; mask > 0; mask /= 2) value = join(value, simt::shuffle_xor(value, mask));
  return value;
}

ESPALIER_KERNEL int32_t sum_lanes(int32_t value) {
  return reduce_lanes(value, [](int32_t a, int32_t b) { return a + b; });
}

/// A warp per forest block and per rectangle: the key blocks.
ESPALIER_KERNEL void list_key_blocks(const TileSchedule& schedule) {
  const ScheduleInputs& inputs = schedule.inputs;
  const int lane = simt::lane();
  const int32_t forest_blocks = inputs.num_forest_blocks(), size = inputs.sizes.keys;
  const int32_t index = simt::block_x() * kScheduleWarps + simt::warp();
  if (index < forest_blocks) {
    const int32_t begin = index * size, end = begin + lesser(size, inputs.num_tokens - begin);
    int32_t low = inputs.num_tokens, high = 0;
    for (int32_t i = begin + lane; i < end; i += simt::kWarpSize) {
      low = lesser(low, inputs.subtree_end[i]);
      high = greater(high, inputs.subtree_end[i]);
    }
    low = reduce_lanes(low, lesser);
    // Clamped, so that invalid values do not cause out-of-bounds reads.
    high = lesser(reduce_lanes(high, greater), inputs.num_tokens);
    if (lane == 0) schedule.key_blocks[index] = {forest_block(begin, end, low, high), -1};
  } else if (index - forest_blocks < inputs.num_rectangles) {
    const ContextRectangle* rectangles = inputs.rectangles;
    const int32_t number = index - forest_blocks;
    int32_t before = 0;
    for (int32_t r = lane; r < number; r += simt::kWarpSize)
      before += num_context_blocks(rectangles[r], size);
    before = sum_lanes(before);
    const ContextRectangle own = rectangles[number];
    for (int32_t i = lane; i < num_context_blocks(own, size); i += simt::kWarpSize) {
      const int32_t begin = own.key_begin + i * size, end = begin + lesser(size, own.key_end - begin);
      schedule.key_blocks[forest_blocks + before + i] = {context_block(own, begin, end), -1};
    }
  }
}

/// The largest index in [from, to) for which `test` holds, -1 for none. Collective over a warp.
template <class Test>
ESPALIER_KERNEL int32_t find_last(int32_t from, int32_t to, const Test& test) {
  const int lane = simt::lane();
  for (int32_t top = to; top > from; top -= simt::kWarpSize) {
    const int32_t index = top - 1 - lane;
    const uint32_t found = simt::ballot(index >= from && test(index));
    if (found != 0) return top - 1 - simt::lowest_bit(found);
  }
  return -1;
}

/// A warp per key block, then one per query block: lists, and how much work a query block is.
ESPALIER_KERNEL void link_blocks(const TileSchedule& schedule) {
  const ScheduleInputs& inputs = schedule.inputs;
  const ListedBlock* blocks = schedule.key_blocks;
  const int32_t forest_blocks = inputs.num_forest_blocks(), key_blocks = inputs.num_key_blocks();
  const int32_t index = simt::block_x() * kScheduleWarps + simt::warp();
  if (index < key_blocks) {
    const KeyBlock block = blocks[index].block;
    const int32_t from = index < forest_blocks ? 0 : forest_blocks;
    const int32_t previous =
        find_last(from, index, [&](int32_t i) { return blocks[i].block.query_end >= block.query_end; });
    if (simt::lane() == 0) schedule.key_blocks[index].previous = previous;
  } else if (index - key_blocks < inputs.num_query_blocks()) {
    const int32_t query_block = index - key_blocks;
    const int32_t begin = schedule.query_begin(query_block), end = schedule.query_end(query_block);
    const auto last_of_chain = [&](int32_t from, int32_t to) {
      return find_last(from, to, [&](int32_t i) {
        return blocks[i].block.query_begin <= begin && begin < blocks[i].block.query_end;
      });
    };
    const int32_t first = begin / inputs.sizes.keys;
    const int32_t chain = last_of_chain(forest_blocks, key_blocks);
    const int32_t last =
        find_last(forest_blocks, key_blocks, [&](int32_t i) { return blocks[i].block.query_begin < end; });
    const int32_t before =
        find_last(forest_blocks, key_blocks, [&](int32_t i) { return blocks[i].block.query_begin <= begin; });
    KeyList context{chain, kNoStretch, chain};
    if (last != before) context = {last, before < 0 ? forest_blocks : before + 1, chain};
    const QueryLists lists{{(end - 1) / inputs.sizes.keys, first, last_of_chain(0, first)}, context};
    int32_t keys = 0;
    for (int32_t i = simt::lane(); i < key_blocks; i += simt::kWarpSize) {
      if (classify(blocks[i].block, begin, end) != TileClass::kEmpty) keys += blocks[i].block.num_keys();
    }
    keys = sum_lanes(keys);
    if (simt::lane() != 0) return;
    schedule.lists[query_block] = lists;
    schedule.query_work[query_block] = int64_t{keys} * (end - begin);
  }
}

/// A warp per query block: its rank is the number of blocks before it. Key blocks are ordered by key_parts.h.
ESPALIER_KERNEL void order_blocks(const TileSchedule& schedule) {
  const int64_t* work = schedule.query_work;
  const int32_t count = schedule.inputs.num_query_blocks();
  const int32_t index = simt::block_x() * kScheduleWarps + simt::warp();
  if (index >= count) return;
  const int64_t own = work[index];
  int32_t rank = 0;
  for (int32_t i = simt::lane(); i < count; i += simt::kWarpSize) {
    rank += work[i] > own || (work[i] == own && i < index) ? 1 : 0;
  }
  rank = sum_lanes(rank);
  if (simt::lane() == 0) schedule.query_order[rank] = index;
}

/// Lists the tiles of a schedule that has been placed, on `stream`, a cudaStream_t.
void build_schedule(const TileSchedule& schedule, void* stream);

}  // namespace espalier::cuda
