// SPDX-License-Identifier: Apache-2.0
// A forest in chunks, as plain lists.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/base/csr.h"

namespace espalier::detail {

/// The most tokens of a chunk, unless a caller wants others.
inline constexpr int64_t kChunkTokens = 64;

/// Tokens that follow each other on one path.
struct Chunk {
  int64_t begin, size;
  int64_t parent;   // the chunk that it goes on from, or -1
  int64_t context;  // where parent is -1: the context that it goes on from, or -1
};

struct Chunks {
  std::vector<Chunk> chunks;      // in the order of their tokens
  std::vector<int64_t> of_token;  // [T]
};

/// Chunks of at most `chunk_size` tokens, a power of two. One never goes beyond a token that branches or at
/// which a state is wanted.
Chunks cut_into_chunks(std::span<const int32_t> prev, std::span<const int64_t> ends, int64_t chunk_size);

/// Chunks of one bucket are padded to one length, a power of two
/// less than twice their own, so that a chunk costs about what it holds.
struct ChunkBucket {
  int64_t length = 0;
  std::vector<int64_t> token;  // [n * length], the last one of a chunk again where it is shorter
  std::vector<int64_t> size;   // [n] tokens
  std::vector<int64_t>
      level_begin;  // [levels + 1]: chunks of level l are [level_begin[l], level_begin[l + 1])

  int64_t num_chunks() const { return static_cast<int64_t>(size.size()); }
  int64_t num_chunks(int64_t level) const { return level_begin[level + 1] - level_begin[level]; }
};

/// The tree of chunks, level by level. A chunk starts from the state at the end of its parent, which is on
/// the level above. The chunks of a level are in the order of the buckets, and in that of each bucket.
struct ChunkTree {
  std::vector<ChunkBucket> buckets;
  std::vector<int64_t>
      place;            // [T]: of each token among the rows [n * length] of all buckets, one after another
  Csr<int64_t> source;  // row l: for each chunk of level l its parent's number on level l - 1; on level 0
                        // 1 + c where it goes on from context c, otherwise 0
  Csr<int64_t> end;     // row l: the chunks of level l at whose ends a state is wanted, and
  Csr<int64_t> end_number;  // which of the wanted states it is

  int64_t num_levels() const { return source.num_rows(); }
};

/// The chunks of cut_into_chunks, level by level.
ChunkTree make_chunk_tree(std::span<const int32_t> prev, std::span<const int64_t> ends, int64_t chunk_size);

}  // namespace espalier::detail
