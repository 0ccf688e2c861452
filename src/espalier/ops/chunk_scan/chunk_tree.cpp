// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/chunk_scan/chunk_tree.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "espalier/ops/paths.h"

namespace espalier::detail {
namespace {

struct PlacedChunk : RecurrenceChunk {
  int64_t level = 0;
  int64_t number = 0;  // index on its level
};

// By token: whether its chunk must end with it.
std::vector<bool> borders(std::span<const int32_t> prev, std::span<const int64_t> ends) {
  std::vector<bool> border(prev.size()), has_child(prev.size());
  for (size_t t = 0; t < prev.size(); ++t) {
    const auto before = prev[t];
    const bool follows = t > 0 && before == static_cast<int64_t>(t) - 1;
    if (t > 0 && !follows) border[t - 1] = true;
    if (before < 0) continue;
    if (has_child[before]) border[before] = true;
    has_child[before] = true;
  }
  for (const int64_t token : ends) border[token] = true;
  return border;
}

std::vector<PlacedChunk> with_levels(const std::vector<RecurrenceChunk>& chunks) {
  std::vector<PlacedChunk> placed;
  for (const RecurrenceChunk& chunk : chunks)
    placed.push_back({chunk, chunk.parent < 0 ? 0 : placed[chunk.parent].level + 1});
  return placed;
}

int64_t bucket_index(const RecurrenceChunk& chunk) {
  return std::bit_width(static_cast<uint64_t>(chunk.size - 1));
}

// Sorts chunks by level, then bucket, stably. Sets their numbers.
std::vector<int64_t> in_order(std::vector<PlacedChunk>* chunks) {
  std::vector<int64_t> order(chunks->size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    const PlacedChunk &first = (*chunks)[a], &second = (*chunks)[b];
    return std::pair(first.level, bucket_index(first)) < std::pair(second.level, bucket_index(second));
  });
  int64_t level = -1, number = 0;
  for (const int64_t c : order) {
    number = (*chunks)[c].level == level ? number + 1 : 0;
    level = (*chunks)[c].level;
    (*chunks)[c].number = number;
  }
  return order;
}

void set_sources(const std::vector<PlacedChunk>& chunks, const std::vector<int64_t>& order,
                 ChunkTree* result) {
  int64_t level = 0;
  for (const int64_t c : order) {
    for (; level < chunks[c].level; ++level) result->source.end_row();
    const PlacedChunk& chunk = chunks[c];
    result->source.values.push_back(level == 0 ? 1 + chunk.context : chunks[chunk.parent].number);
  }
  result->source.end_row();
}

void set_buckets(const std::vector<PlacedChunk>& chunks, const std::vector<int64_t>& order,
                 int64_t chunk_size, ChunkTree* result) {
  const int64_t num_levels = result->num_levels();
  std::vector<ChunkBucket> all(std::bit_width(static_cast<uint64_t>(chunk_size)));
  for (size_t b = 0; b < all.size(); ++b) {
    all[b].length = int64_t{1} << b;
    all[b].level_begin.assign(num_levels + 1, 0);
  }
  for (const int64_t c : order) {
    ChunkBucket& bucket = all[bucket_index(chunks[c])];
    bucket.size.push_back(chunks[c].size);
    ++bucket.level_begin[chunks[c].level + 1];
    for (int64_t i = 0; i < bucket.length; ++i) {
      bucket.token.push_back(chunks[c].begin + std::min(i, chunks[c].size - 1));
    }
  }
  for (ChunkBucket& bucket : all) {
    if (bucket.size.empty()) continue;
    std::partial_sum(bucket.level_begin.begin(), bucket.level_begin.end(), bucket.level_begin.begin());
    result->buckets.push_back(std::move(bucket));
  }
}

}  // namespace

Chunks cut_into_chunks(std::span<const int32_t> prev, std::span<const int64_t> ends, int64_t chunk_size) {
  const std::vector<bool> border = borders(prev, ends);
  Chunks result;
  std::vector<RecurrenceChunk>& chunks = result.chunks;
  for (int64_t t = 0; t < static_cast<int64_t>(prev.size()); ++t) {
    if (chunks.empty() || border[t - 1] || chunks.back().size == chunk_size)
      chunks.push_back({t, 0, prev[t] < 0 ? -1 : result.chunk_of_token[prev[t]], context_of(prev[t])});
    ++chunks.back().size;
    result.chunk_of_token.push_back(static_cast<int64_t>(chunks.size()) - 1);
  }
  return result;
}

ChunkTree make_chunk_tree(std::span<const int32_t> prev, std::span<const int64_t> ends, int64_t chunk_size) {
  const Chunks cut = cut_into_chunks(prev, ends, chunk_size);
  const std::vector<int64_t>& chunk_of_token = cut.chunk_of_token;
  std::vector<PlacedChunk> chunks = with_levels(cut.chunks);
  const std::vector<int64_t> order = in_order(&chunks);
  ChunkTree result;
  set_sources(chunks, order, &result);
  set_buckets(chunks, order, chunk_size, &result);
  result.place.resize(prev.size());
  int64_t row = 0;
  for (const ChunkBucket& bucket : result.buckets) {
    for (int64_t n = 0; n < bucket.num_chunks(); ++n, row += bucket.length) {
      const int64_t begin = bucket.token[n * bucket.length];
      for (int64_t i = 0; i < bucket.size[n]; ++i) result.place[begin + i] = row + i;
    }
  }
  std::vector<std::vector<int64_t>> wanted(result.num_levels());
  for (size_t e = 0; e < ends.size(); ++e) wanted[chunks[chunk_of_token[ends[e]]].level].push_back(e);
  for (const std::vector<int64_t>& level : wanted) {
    for (const int64_t e : level) {
      result.end.values.push_back(chunks[chunk_of_token[ends[e]]].number);
      result.end_number.values.push_back(e);
    }
    result.end.end_row();
    result.end_number.end_row();
  }
  return result;
}

}  // namespace espalier::detail
