// SPDX-License-Identifier: Apache-2.0
// Examples of places where trajectories diverge, and the choice of those that are shown.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/inspect/chat_roles.h"

namespace espalier {

/// A place where two trajectories diverge, as token ids. Each token vector has at most kSnippet tokens.
struct SharingExample {
  static constexpr int64_t kSnippet = 24;
  int64_t position = 0;
  int64_t left_row = 0, right_row = 0;
  int64_t left_node = 0, right_node = 0;         // forest nodes that begin at the place
  Role role = Role::kUnknown;                    // of the speaker
  std::vector<int32_t> before;                   // common tokens before the place
  std::vector<int32_t> left, right;              // tokens that differ
  std::vector<int32_t> left_after, right_after;  // tokens after these
  int64_t common = 0;                            // see Divergence
  bool between_groups = false;                   // the two trajectories have no group in common
};

/// Keeps a bounded number of examples: of those with the same differing texts, or from the same place, the
/// few largest (by `common`), and of those that look identical only the largest.
class ExamplePool {
 public:
  explicit ExamplePool(int64_t shown) : shown_(shown) {}

  void add(SharingExample example);

  /// At most `shown` examples, no two of which look identical, the largest first. Order of preference:
  /// examples from other places with two new texts; other pairs of texts from other places; other pairs of
  /// texts from the same place; the same pairs in another context. Within each, the largest first.
  std::vector<SharingExample> chosen() const;

 private:
  int64_t shown_;
  std::vector<SharingExample> kept_;
};

}  // namespace espalier
