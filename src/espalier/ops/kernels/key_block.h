// SPDX-License-Identifier: Apache-2.0
// Blocks of keys and their visibility, shared by CPU and GPU (docs/math.md, "Attention by tiles"). All
// functions are constexpr, which nvcc compiles for host and device.
#pragma once

#include <cstdint>

namespace espalier {

/// Tokens per block of queries and of keys; the last ones may be smaller.
struct BlockSizes {
  int32_t queries = 0;
  int32_t keys = 0;
};

/// Keys [key_begin, key_end) of a context segment, visible to all queries in [query_begin, query_end).
struct ContextRectangle {
  int32_t segment;
  int32_t key_begin;
  int32_t key_end;
  int32_t query_begin;
  int32_t query_end;
};

/// Keys [begin, end) of one segment.
struct KeyBlock {
  int32_t segment;  // -1: the forest's own tokens
  int32_t begin;
  int32_t end;
  int32_t query_begin;  // queries outside [query_begin, query_end) see none of the keys
  int32_t query_end;
  int32_t full_begin;  // queries in [full_begin, full_end), which may be empty, see all of them
  int32_t full_end;

  constexpr int32_t num_keys() const { return end - begin; }
};

/// Tokens [begin, end) of the forest, with minimum and maximum `low` and `high` of subtree_end.
constexpr KeyBlock forest_block(int32_t begin, int32_t end, int32_t low, int32_t high) {
  return {-1, begin, end, begin, high, end - 1, low};
}

/// Keys [begin, end) of a rectangle.
constexpr KeyBlock context_block(const ContextRectangle& r, int32_t begin, int32_t end) {
  return {r.segment, begin, end, r.query_begin, r.query_end, r.query_begin, r.query_end};
}

/// Number of blocks of `size` keys of a rectangle.
constexpr int32_t num_context_blocks(const ContextRectangle& r, int32_t size) {
  return (r.key_end - r.key_begin + size - 1) / size;
}

enum class TileClass : uint8_t { kEmpty, kPartial, kFull };

/// Classifies the tile of queries [query_begin, query_end), not empty, and a block: empty, partial or full.
constexpr TileClass classify(const KeyBlock& block, int32_t query_begin, int32_t query_end) {
  if (query_end <= block.query_begin || block.query_end <= query_begin) return TileClass::kEmpty;
  const bool full = block.full_begin <= query_begin && query_end <= block.full_end;
  return full ? TileClass::kFull : TileClass::kPartial;
}

}  // namespace espalier
