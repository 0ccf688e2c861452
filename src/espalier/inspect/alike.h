// SPDX-License-Identifier: Apache-2.0
// Finds token sequences that are similar to a given one.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace espalier {

/// Finds, among sequences added earlier, those that have n-grams of ids in common with a new one, anywhere in
/// the first kAlikeWindow tokens. For each sequence the smallest hashes of its n-grams are stored (a min-hash
/// sketch), so the work does not grow with the number of sequences. Sequences with nearly the same text are
/// found almost always, those with a few common n-grams sometimes.
class AlikeIndex {
 public:
  /// Sequences that share a stored hash with `tokens` and were the first to have it, without duplicates.
  std::vector<int64_t> find(std::span<const int32_t> tokens) const;
  void add(std::span<const int32_t> tokens, int64_t sequence);

 private:
  std::unordered_map<uint64_t, int64_t> first_;
};

inline constexpr int64_t kAlikeWindow = 256;

}  // namespace espalier
