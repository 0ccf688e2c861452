// SPDX-License-Identifier: Apache-2.0
#include "espalier/inspect/alike.h"

#include <algorithm>
#include <iterator>

namespace espalier {
namespace {

constexpr int64_t kRun = 8;
// Number of hashes stored of the first tokens, which may be all that two sequences share, and of the whole
// window.
constexpr int64_t kKept = 4, kFirstTokens = 64;

uint64_t hash_of(std::span<const int32_t> run) {
  uint64_t hash = 0;
  for (const int32_t token : run) {
    hash = (hash ^ static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  }
  return hash;
}

std::vector<uint64_t> sketch_of(std::span<const int32_t> tokens) {
  tokens = tokens.first(std::min<size_t>(tokens.size(), kAlikeWindow));
  std::vector<uint64_t> hashes;
  for (int64_t i = 0; i + kRun <= std::ssize(tokens); ++i) hashes.push_back(hash_of(tokens.subspan(i, kRun)));
  const auto keep_smallest = [&](int64_t among) {
    std::vector<uint64_t> some(hashes.begin(), hashes.begin() + std::min(among, std::ssize(hashes)));
    const auto kept = some.begin() + std::min(kKept, std::ssize(some));
    std::partial_sort(some.begin(), kept, some.end());
    some.erase(kept, some.end());
    return some;
  };
  std::vector<uint64_t> sketch = keep_smallest(kFirstTokens), rest = keep_smallest(kAlikeWindow);
  sketch.insert(sketch.end(), rest.begin(), rest.end());
  return sketch;
}

}  // namespace

std::vector<int64_t> AlikeIndex::find(std::span<const int32_t> tokens) const {
  std::vector<int64_t> found;
  for (const uint64_t hash : sketch_of(tokens)) {
    if (const auto at = first_.find(hash); at != first_.end()) found.push_back(at->second);
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

void AlikeIndex::add(std::span<const int32_t> tokens, int64_t sequence) {
  for (const uint64_t hash : sketch_of(tokens)) first_.emplace(hash, sequence);
}

}  // namespace espalier
