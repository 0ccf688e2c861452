// SPDX-License-Identifier: Apache-2.0
// The keys that each token of a micro-batch sees, as intervals: what attention libraries with interval masks
// take.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/plan/context.h"

namespace espalier {

/// The tokens of a micro-batch and what it reads of its ancestors. Key numbers count the columns of the
/// context blocks first, one block after another, then the tokens.
struct AttentionMask {
  std::span<const int32_t> subtree_end;        // [T] Layout::subtree_end
  std::span<const int32_t> position;           // [T] Layout::position_ids; needed for a window
  std::span<const ContextBlock> context = {};  // as context_blocks gives them
  int64_t sliding_window = 0;                  // positions; 0: none
};

/// Column i holds increasing numbers f0 <= f1 <= ..., F of them: token i sees key j where j < f0, or f1 <= j
/// < f2, or f3 <= j < f4, and so on. The last number is repeated where a token has fewer than F. This is
/// `mask_func` of cudnn.flex_attention.
struct VisibleIntervals {
  int64_t num_bounds = 1;       // F, odd
  std::vector<int32_t> bounds;  // [F, T]
};

/// As few intervals as the order of the keys allows. On a forest in preorder, a path has one more interval
/// than it has steps to a child that is not the first, so at most 1 + log2(leaves) where the first child of
/// every node has most leaves (ChildOrder::kMostLeavesFirst). O(F T). Throws InputError for a window without
/// positions, and for blocks beyond the tokens.
VisibleIntervals visible_intervals(const AttentionMask& mask);

}  // namespace espalier
