// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cpu/attention/tree_attention_tile.h"

#include <algorithm>
#include <bit>

namespace espalier {

namespace {

// Mean number of consecutive tokens with equal subtree_end, an estimate of the node length.
int64_t mean_node_length(std::span<const int32_t> subtree_end) {
  const auto tokens = static_cast<int64_t>(subtree_end.size());
  int64_t num_ranges = 1;
  for (int64_t i = 1; i < tokens; ++i) num_ranges += subtree_end[i] != subtree_end[i - 1];
  return tokens / num_ranges;
}

// Limits on rows of a tile and tokens of a block.
struct TileLimits {
  int64_t min_length;  // minimum mean_node_length
  int64_t rows;
  int64_t tokens;
};

}  // namespace

BlockSizes attention_blocks(const AttentionShape& shape, std::span<const int32_t> subtree_end) {
  // Products reach full speed at about 64 rows. More rows amortise the work per key, but with short nodes
  // larger tiles have more masked pairs. Rows of a tile should fit the caches, and there should be enough
  // tiles for several threads.
  constexpr TileLimits kLimits[] = {{256, 256, 128}, {64, 128, 64}, {0, 96, 64}};
  constexpr int64_t kMaxTileSize = 32'768, kMinTiles = 32, kKeys = 64;
  const int64_t length = mean_node_length(subtree_end);
  int64_t tokens = 0;
  for (const TileLimits& limits : kLimits) {
    const int64_t rows = std::clamp<int64_t>(kMaxTileSize / shape.width(), 96, limits.rows);
    tokens = std::min(limits.tokens, rows / shape.group());
    tokens = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(std::max<int64_t>(tokens, 8))));
    if (length >= limits.min_length && shape.num_tokens * shape.num_key_heads >= kMinTiles * tokens) break;
  }
  return {static_cast<int32_t>(tokens), kKeys};
}

KeyChunks::KeyChunks(const Schedule& schedule, const int32_t* subtree_end, int64_t group)
    : schedule_(schedule), subtree_end_(subtree_end), group_(static_cast<int32_t>(group)) {
  chunk_.visible.reserve(kMaxChunkKeys);
  chunk_.ranges.reserve(kMaxChunkKeys);
}

void KeyChunks::start(int32_t query_block) {
  query_begin_ = schedule_.query_begin(query_block);
  query_end_ = schedule_.query_end(query_block);
  tiles_ = schedule_.tiles.row(query_block);
  next_tile_ = 0;
  next_key_ = 0;
}

bool KeyChunks::next() {
  if (next_tile_ == tiles_.size()) return false;
  const size_t first_tile = next_tile_;
  size_t end_tile = first_tile;
  chunk_.ranges.clear();
  chunk_.visible.clear();
  const int32_t num_rows = (query_end_ - query_begin_) * group_;
  chunk_.rows = {num_rows, 0};
  for (; next_tile_ < tiles_.size(); ++next_tile_) {
    const Tile& tile = tiles_[next_tile_];
    if (next_key_ == 0) list_keys(tile);
    const auto free_keys = static_cast<size_t>(kMaxChunkKeys - chunk_.num_keys());
    const size_t block_keys = schedule_.key_blocks[tile.key_block].num_keys();
    if (chunk_.num_keys() > 0 && std::max(block_keys, keys_.size()) > free_keys) break;
    end_tile = next_tile_ + 1;
    const size_t end_key = std::min(keys_.size(), next_key_ + free_keys);
    for (; next_key_ < end_key; ++next_key_) add_key(keys_[next_key_]);
    if (next_key_ < keys_.size()) break;  // continue with them in the next chunk
    next_key_ = 0;
  }
  chunk_.tiles = tiles_.subspan(first_tile, end_tile - first_tile);
  chunk_.num_finished = next_tile_ - first_tile;
  finish_rows();
  return true;
}

void KeyChunks::finish_rows() {
  const int32_t num_rows = (query_end_ - query_begin_) * group_;
  chunk_.rows.begin = chunk_.rows.begin / kCacheLine * kCacheLine;
  chunk_.rows.end = std::min<int32_t>(static_cast<int32_t>(round_up(chunk_.rows.end, kCacheLine)), num_rows);
  chunk_.partial = false;
  for (const RowRange& visible : chunk_.visible) {
    chunk_.partial |= visible.begin > chunk_.rows.begin || visible.end < chunk_.rows.end;
  }
}

void KeyChunks::list_keys(const Tile& tile) {
  const KeyBlock& block = schedule_.key_blocks[tile.key_block];
  const SlidingWindow& window = schedule_.window;
  keys_.clear();
  for (int32_t key = block.begin; key < block.end; ++key) {
    VisibleKey visible{block.segment + 1, key, {query_begin_, query_end_}};
    if (!tile.full) visible.queries = queries_of_key(block, key, subtree_end_, visible.queries);
    if (!tile.full && window.exists()) {
      list_key_in_window(visible, window.key_position(block, key));
    } else if (visible.queries.begin < visible.queries.end) {
      keys_.push_back(visible);
    }
  }
}

void KeyChunks::list_key_in_window(const VisibleKey& key, int32_t position) {
  const SlidingWindow& window = schedule_.window;
  for (int32_t begin = key.queries.begin; begin < key.queries.end;) {
    int32_t end = begin;
    while (end < key.queries.end && window.sees(end, position)) ++end;
    if (begin < end) keys_.push_back({key.segment, key.key, {begin, end}});
    begin = end + 1;
  }
}

void KeyChunks::add_key(const VisibleKey& key) {
  const RowRange rows{(key.queries.begin - query_begin_) * group_, (key.queries.end - query_begin_) * group_};
  chunk_.rows = {std::min(chunk_.rows.begin, rows.begin), std::max(chunk_.rows.end, rows.end)};
  chunk_.visible.push_back(rows);
  if (!chunk_.ranges.empty()) {
    KeySpan& last = chunk_.ranges.back();
    if (last.segment == key.segment && last.begin + last.count == key.key) {
      ++last.count;
      return;
    }
  }
  chunk_.ranges.push_back({key.segment, key.key, 1});
}

}  // namespace espalier
