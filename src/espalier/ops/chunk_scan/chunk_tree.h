// SPDX-License-Identifier: Apache-2.0
// A forest cut into chunks, as lists of indices.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/base/csr.h"
#include "espalier/ops/kernels/cpu/recurrence/recurrence.h"

namespace espalier::detail {

/// Default maximum number of tokens per chunk.
inline constexpr int64_t kChunkTokens = 64;

struct Chunks {
  std::vector<RecurrenceChunk> chunks;  // in the order of their tokens
  std::vector<int64_t> chunk_of_token;  // [T]
};

/// Chunks of at most `chunk_size` tokens, a power of two. A chunk ends at a token that branches or whose
/// state is requested.
Chunks cut_into_chunks(std::span<const int32_t> prev, std::span<const int64_t> ends, int64_t chunk_size);

/// Chunks of one bucket are padded to the same length, a power of two less than twice their size, to bound
/// the padding.
struct ChunkBucket {
  int64_t length = 0;
  std::vector<int64_t> token;  // [n * length], padded with the last token of a chunk
  std::vector<int64_t> size;   // [n] tokens
  std::vector<int64_t>
      level_begin;  // [levels + 1]: chunks of level l are [level_begin[l], level_begin[l + 1])

  int64_t num_chunks() const { return static_cast<int64_t>(size.size()); }
  int64_t num_chunks(int64_t level) const { return level_begin[level + 1] - level_begin[level]; }
};

/// The tree of chunks by level. A chunk starts from the final state of its parent, which is on the level
/// above. Chunks of a level are ordered by bucket.
struct ChunkTree {
  std::vector<ChunkBucket> buckets;
  std::vector<int64_t>
      place;                // [T]: index of each token in the concatenated rows [n * length] of all buckets
  Csr<int64_t> source;      // row l: for each chunk of level l its parent's number on level l - 1; on level 0
                            // 1 + c if it continues context c, otherwise 0
  Csr<int64_t> end;         // row l: chunks of level l whose final state is requested, and
  Csr<int64_t> end_number;  // index of the requested state

  int64_t num_levels() const { return source.num_rows(); }
};

/// The chunks of cut_into_chunks, level by level.
ChunkTree make_chunk_tree(std::span<const int32_t> prev, std::span<const int64_t> ends, int64_t chunk_size);

}  // namespace espalier::detail
