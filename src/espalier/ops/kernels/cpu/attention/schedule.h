// SPDX-License-Identifier: Apache-2.0
// The tiles (query block, key block) of attention over a forest in preorder and its context.
// Query j sees key i of the forest iff i <= j < subtree_end[i]. So a block of keys is visible only to queries
// in [first key, max of subtree_end), and completely visible to those in [last key, min of subtree_end). Two
// comparisons classify a tile.
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
  int32_t turn;  // how many of the key block's tiles come before it, by query_order
  bool full;
};

/// Query j sees key i only if position[j] - (position of key i) < size.
struct SlidingWindow {
  int32_t size = 0;                                    // 0: no window; positions are ignored
  const int32_t* position = nullptr;                   // of the forest's tokens
  std::span<const int32_t* const> context_position{};  // of the keys of each context segment

  bool exists() const { return size > 0; }
  /// The position of a key of a block's segment.
  int32_t key_position(const KeyBlock& block, int32_t key) const {
    return block.segment < 0 ? position[key] : context_position[block.segment][key];
  }
  bool sees(int32_t query, int32_t key_position) const { return position[query] - key_position < size; }
};

struct Schedule {
  BlockSizes sizes;
  int32_t num_tokens = 0;
  std::vector<KeyBlock> key_blocks;  // the forest's own in order, then the context's
  Csr<Tile> tiles;                   // by query block: tiles that are not empty
  std::vector<int32_t> query_order;  // query blocks by the number of (query, key) pairs in their tiles,
                                     // largest first
  int64_t num_pairs = 0;             // (query, key) pairs in listed tiles
  SlidingWindow window;

  int32_t num_query_blocks() const { return static_cast<int32_t>(tiles.num_rows()); }
  int32_t query_begin(int32_t block) const { return block * sizes.queries; }
  int32_t query_end(int32_t block) const;
};

/// Throws InputError unless subtree_end is that of a forest in preorder: i < subtree_end[i] <= T, and
/// subtree_end[j] <= subtree_end[i] for i <= j < subtree_end[i]. Linear time.
void check_forest(std::span<const int32_t> subtree_end);

/// The schedule of a forest (one int32 per key) with context. Rectangles have their own key blocks. Time and
/// memory are linear in tokens plus listed tiles (and n log n in the number of blocks): empty tiles are not
/// visited, so a star with many leaves costs about two tiles per block of queries. With a window, every tile
/// of the forest is visited, and dropped if no query sees a key. The window's positions must outlive the
/// schedule. Throws InputError like check_forest; rectangles must be valid.
Schedule make_schedule(std::span<const int32_t> subtree_end, std::span<const ContextRectangle> context,
                       BlockSizes sizes, const SlidingWindow& window = {});

/// The queries in [begin, end) to which some key of a block is visible in the forest, without the window.
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
