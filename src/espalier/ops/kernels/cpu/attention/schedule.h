// SPDX-License-Identifier: Apache-2.0
// Which blocks of keys each block of queries attends to, for a forest in preorder and its context.
// Query j sees key i of the forest iff i <= j < subtree_end[i]. So a block of keys is seen by queries in one
// range only, [its first key, max of subtree_end), and all of it by those in [its last key, min of
// subtree_end). Two comparisons per tile tell what is in it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/base/csr.h"
#include "espalier/ops/kernels/key_block.h"

namespace espalier {

/// A block of keys in the list of a block of queries.
struct Tile {
  int32_t key_block;
  int32_t turn;  // its place in the key block's own list
  bool full;
};

/// Query j sees key i only where position[j] - (the key's position) < size.
struct SlidingWindow {
  int32_t size = 0;                                    // 0: no window, and positions are not read
  const int32_t* position = nullptr;                   // of the forest's tokens
  std::span<const int32_t* const> context_position{};  // of the keys of each context segment

  bool exists() const { return size > 0; }
  /// The position of a key of a block's segment.
  int32_t of_key(const KeyBlock& block, int32_t key) const {
    return block.segment < 0 ? position[key] : context_position[block.segment][key];
  }
  bool sees(int32_t query, int32_t key_position) const { return position[query] - key_position < size; }
};

struct TileCounts {
  int64_t empty = 0;
  int64_t partial = 0;
  int64_t full = 0;
};

struct Schedule {
  BlockSizes sizes;
  int32_t num_tokens = 0;
  std::vector<KeyBlock> key_blocks;  // the forest's own in order, then the context's
  Csr<Tile> tiles;                   // by query block: what is not empty
  Csr<int32_t> query_blocks;  // by key block: the query blocks that have a tile with it, in query_order
  std::vector<int32_t> query_order;  // query blocks by the number of (query, key) pairs in their tiles,
                                     // largest first
  std::vector<int32_t> key_order;    // key blocks likewise
  TileCounts counts;
  int64_t num_pairs = 0;  // (query, key) pairs in listed tiles
  SlidingWindow window;

  int32_t num_query_blocks() const { return static_cast<int32_t>(tiles.num_rows()); }
  int32_t query_begin(int32_t block) const { return block * sizes.queries; }
  int32_t query_end(int32_t block) const;
};

/// Throws InputError where subtree_end is not that of a forest in preorder: i < subtree_end[i] <= T, and
/// subtree_end[j] <= subtree_end[i] for i <= j < subtree_end[i]. Linear time.
void check_forest(std::span<const int32_t> subtree_end);

/// The schedule of a forest (one int32 per key) with context. A rectangle becomes blocks of its own.
/// Time and memory are linear in tokens plus listed tiles (and n log n in the number of blocks): empty tiles
/// are never looked at, so a star of many leaves costs two or so tiles per block of queries. With a window, a
/// tile is looked at where the forest alone would list it, and it is empty if no query sees a key. The
/// window's positions must outlive the schedule. Throws InputError where check_forest does; rectangles are
/// taken as checked.
Schedule make_schedule(std::span<const int32_t> subtree_end, std::span<const ContextRectangle> context,
                       BlockSizes sizes, const SlidingWindow& window = {});

/// The queries in [begin, end) to which a key of a block can be visible for the forest's sake.
struct QueryRange {
  int32_t begin;
  int32_t end;
};
inline QueryRange queries_of_key(const KeyBlock& block, int32_t key, const int32_t* subtree_end,
                                 QueryRange among) {
  if (block.segment < 0) {
    return {key > among.begin ? key : among.begin,
            subtree_end[key] < among.end ? subtree_end[key] : among.end};
  }
  return {block.query_begin > among.begin ? block.query_begin : among.begin,
          block.query_end < among.end ? block.query_end : among.end};
}

}  // namespace espalier
