// SPDX-License-Identifier: Apache-2.0
// Shared by forward and backward of tree attention: a tile of query rows and the keys it sees.
//   A tile has the queries of one block and of all heads that share a key head; its row of token j and head g
// of the group is (j - first token) * group + g. The keys that the tile sees are gathered from the blocks in
// the schedule into chunks; keys that no query of the tile sees are skipped. A key is seen by adjacent rows
// of a tile: those of tokens [max(i, first), min(subtree_end[i], last)) of the block. A sliding window may
// split them into several ranges, if branches extend beyond it; the key is then listed once per range.
#pragma once

#include <vector>

#include "espalier/ops/kernels/cpu/attention/tree_attention.h"

namespace espalier {

constexpr int32_t kMaxChunkKeys = 128;
static_assert(kMaxChunkKeys % kKeysAtOnce == 0);
constexpr int64_t kCacheLine = 16;  // in floats; alignment of tile rows and scratch parts

constexpr int64_t round_up(int64_t number, int64_t step) {
  return (number + step - 1) / step * step;
}

/// Adjacent keys of a segment (0: the forest's own, s + 1: context segment s).
struct KeySpan {
  int32_t segment;
  int32_t begin;
  int32_t count;
};

struct KeyChunk {
  std::vector<KeySpan> ranges;
  std::vector<RowRange> visible;  // by key
  RowRange rows;                  // contains visible[c] for all c
  bool partial;                   // whether some of `rows` do not see some key
  std::span<const Tile> tiles;    // the tiles that these keys belong to
  size_t num_finished;            // number of leading tiles whose keys end in this chunk

  int32_t num_keys() const { return static_cast<int32_t>(visible.size()); }
};

/// Iterates over the chunks of keys of a tile.
class KeyChunks {
 public:
  KeyChunks(const Schedule& schedule, const int32_t* subtree_end, int64_t group);

  /// Starts the tile of a query block.
  void start(int32_t query_block);
  /// Advances to the next chunk; false if there is none.
  bool next();

  const KeyChunk& chunk() const { return chunk_; }

 private:
  struct VisibleKey {
    int32_t segment;
    int32_t key;
    QueryRange queries;
  };

  void list_keys(const Tile& tile);
  void list_key_in_window(const VisibleKey& key, int32_t position);
  void add_key(const VisibleKey& key);
  void finish_rows();

  const Schedule& schedule_;
  const int32_t* subtree_end_;
  int32_t group_;
  int32_t query_begin_ = 0, query_end_ = 0;
  std::span<const Tile> tiles_;
  size_t next_tile_ = 0;
  std::vector<VisibleKey> keys_;  // keys of the next tile
  size_t next_key_ = 0;           // index into keys_
  KeyChunk chunk_;
};

/// Allocates parts of a thread's scratch.
template <class Scalar>
class Scratch {
 public:
  explicit Scratch(Scalar* begin) : next_(begin) {}
  Scalar* take(int64_t count) {
    Scalar* part = next_;
    next_ += round_up(count, kCacheLine);
    return part;
  }

 private:
  Scalar* next_;
};

/// Converts elements to the accumulator type and back.
template <class Scalar>
class Converter {
 public:
  explicit Converter(InstructionSet isa) : math_(tile_math<Scalar>(isa)), bfloat16_(bfloat16_math(isa)) {}

  void load(const Rows<const Scalar>& from, Scalar* to) const { math_.copy_rows(from, to); }
  void load(const Rows<const BFloat16>& from, float* to) const { bfloat16_.upcast_rows(from, to); }
  void store(const Scalar* from, Scalar* to, int64_t count) const {
    math_.copy_rows({from, count, 1, count}, to);
  }
  void store(const float* from, BFloat16* to, int64_t count) const { bfloat16_.narrow(from, to, count); }

 private:
  const TileMath<Scalar>& math_;
  const BFloat16Math& bfloat16_;
};

/// The tile of one query block and one key head.
struct TileRows {
  int64_t first_token;
  int64_t num_tokens;
  int64_t key_head;
  int64_t group;

  int64_t count() const { return num_tokens * group; }
  int64_t token(int64_t row) const { return first_token + row / group; }
  int64_t head(int64_t row) const { return key_head * group + row % group; }
};

template <class Element>
TileRows tile_rows(const AttentionInputs<Element>& inputs, int32_t query_block, int64_t key_head) {
  const Schedule& schedule = *inputs.schedule;
  const int64_t begin = schedule.query_begin(query_block);
  return {begin, schedule.query_end(query_block) - begin, key_head, inputs.shape.group()};
}

/// Copies a tile's rows of q, dO or O to `to` [rows, width].
template <class Element, class Scalar>
void load_rows(const TokenHeads<const Element>& from, const TileRows& tile, int64_t width,
               const Converter<Scalar>& converter, Scalar* to) {
  for (int64_t t = 0; t < tile.num_tokens; ++t, to += tile.group * width) {
    const Element* heads = from.row(tile.first_token + t, tile.key_head * tile.group);
    converter.load({heads, from.head_stride, tile.group, width}, to);
  }
}

/// Copies a tile's rows `from` [rows, width] to out or dQ.
template <class Element, class Scalar>
void store_rows(const Scalar* from, const TileRows& tile, int64_t width, const Converter<Scalar>& converter,
                const TokenHeads<Element>& to) {
  for (int64_t r = 0; r < tile.count(); ++r) {
    converter.store(from + r * width, to.row(tile.token(r), tile.head(r)), width);
  }
}

/// Keys or values of a chunk as rows: in place if they are adjacent, completely visible and need no
/// conversion, otherwise gathered into `buffer` [keys, width].
template <class Element, class Scalar>
Rows<const Scalar> rows_of_keys(std::span<const TokenHeads<const Element>> segments, const KeyChunk& chunk,
                                int64_t key_head, int64_t width, const Converter<Scalar>& converter,
                                Scalar* buffer) {
  if constexpr (std::is_same_v<Element, Scalar>) {
    const KeySpan& range = chunk.ranges[0];
    const TokenHeads<const Element>& segment = segments[range.segment];
    if (chunk.ranges.size() == 1 && !chunk.partial) {
      return {segment.row(range.begin, key_head), segment.token_stride, chunk.num_keys(), width};
    }
  }
  Scalar* row = buffer;
  for (const KeySpan& range : chunk.ranges) {
    const TokenHeads<const Element>& segment = segments[range.segment];
    converter.load({segment.row(range.begin, key_head), segment.token_stride, range.count, width}, row);
    row += range.count * width;
  }
  return {buffer, width, chunk.num_keys(), width};
}

/// Products multiply masked rows by weight 0, which gives NaN if they hold infinities or NaN. Such values are
/// replaced by 0 before the product, and their contribution is added for visible pairs.
template <class Scalar>
class NonFinite {
 public:
  /// Replaces non-finite values in `data` [rows, width] by 0.
  void take_out(const TileMath<Scalar>& math, Scalar* data, int64_t rows, int64_t width) {
    entries_.clear();
    if (math.all_finite(data, rows * width)) return;
    for (int64_t i = 0; i < rows * width; ++i) {
      if (math.all_finite(data + i, 1)) continue;
      entries_.push_back({i / width, i % width, data[i]});
      data[i] = 0;
    }
  }

  /// For the product out += weights^T data, where rows of data are keys: weights [keys, rows] is `tile`.
  void add_over_keys(const ScoreTile<Scalar>& tile, Scalar* out, int64_t width) const {
    for (const Entry& entry : entries_) {
      const RowRange visible = tile.visible[entry.row];
      for (int64_t r = visible.begin; r < visible.end; ++r) {
        out[r * width + entry.column] += tile.scores[entry.row * tile.stride + r] * entry.value;
      }
    }
  }

  /// For the product out = weights data, where rows of data are the tile's rows; `stride`: row stride of out.
  /// `factor`: of the rows in the product.
  void add_over_rows(const ScoreTile<Scalar>& tile, Scalar factor, Scalar* out, int64_t stride) const {
    for (const Entry& entry : entries_) {
      for (int64_t c = 0; c < tile.num_keys; ++c) {
        if (entry.row < tile.visible[c].begin || entry.row >= tile.visible[c].end) continue;
        out[c * stride + entry.column] += tile.scores[c * tile.stride + entry.row] * (factor * entry.value);
      }
    }
  }

 private:
  struct Entry {
    int64_t row;
    int64_t column;
    Scalar value;
  };
  std::vector<Entry> entries_;
};

}  // namespace espalier
