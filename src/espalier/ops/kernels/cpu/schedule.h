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

  int32_t num_query_blocks() const { return static_cast<int32_t>(tiles.num_rows()); }
  int32_t query_begin(int32_t block) const { return block * sizes.queries; }
  int32_t query_end(int32_t block) const;
};

/// Throws InputError where subtree_end is not that of a forest in preorder: i < subtree_end[i] <= T, and
/// subtree_end[j] <= subtree_end[i] for i <= j < subtree_end[i]. Linear time.
void check_forest(std::span<const int32_t> subtree_end);

/// The schedule of a forest (one int32 per key) with context. A rectangle becomes blocks of its own.
/// Time and memory are linear in tokens plus listed tiles (and n log n in the number of blocks): empty tiles
/// are never looked at, so a star of many leaves costs two or so tiles per block of queries.
/// Throws InputError where check_forest does; rectangles are taken as checked.
Schedule make_schedule(std::span<const int32_t> subtree_end, std::span<const ContextRectangle> context,
                       BlockSizes sizes);

}  // namespace espalier
