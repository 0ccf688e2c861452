// SPDX-License-Identifier: Apache-2.0
// Examples of places where trajectories diverge, and which of many are shown.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/inspect/chat_roles.h"

namespace espalier {

/// A place where two trajectories diverge, as token ids. Each run has at most kSnippet tokens.
struct SharingExample {
  static constexpr int64_t kSnippet = 24;
  int64_t position = 0;
  int64_t left_row = 0, right_row = 0;
  int64_t left_node = 0, right_node = 0;         // of the forest: the branches that begin at the place
  Role role = Role::kUnknown;                    // who speaks
  std::vector<int32_t> before;                   // what both say
  std::vector<int32_t> left, right;              // what differs
  std::vector<int32_t> left_after, right_after;  // what follows
  int64_t common = 0;                            // see Divergence
  bool between_groups = false;                   // the two trajectories have no group in common
};

/// Keeps a bounded number of the examples that it is given: of those with the same differing texts, or from
/// the same place, the largest (by `common`) few, and of those that look the same altogether only the
/// largest.
class ExamplePool {
 public:
  explicit ExamplePool(int64_t shown) : shown_(shown) {}

  void add(SharingExample example);

  /// At most `shown` examples, no two of which look the same, the largest first. Preferred are examples from
  /// other places with texts that are both new, then other pairs of texts from other places, then other pairs
  /// of texts from the same place, then the same pairs in another context; in each the largest.
  std::vector<SharingExample> chosen() const;

 private:
  int64_t shown_;
  std::vector<SharingExample> kept_;
};

}  // namespace espalier
