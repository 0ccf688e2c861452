// Tree packing for trees of any size: constructions in nearly linear time, then a local search.
// The problem and its notation are those of leaf_parts.h.
#pragma once

#include "espalier/plan/leaf_parts.h"

namespace espalier {

/// Leaves in preorder, each into the current part while it fits; otherwise it opens the next part
/// ("initiating a new traversal whenever the accumulated length exceeds capacity", arXiv 2511.00413,
/// section 2.2.2). Linear time.
LeafParts fill_depth_first(const TokenTree& tree, int64_t budget);

/// Merges groups of leaves bottom up: at each node, deepest first, the groups of its children are packed into
/// bins, best-fit decreasing, so that prefixes are saved where they are longest. Two groups g, h that meet at
/// v become one of U(g) + U(h) - L(v) tokens; hence U alone says what a group can still take, at whatever
/// ancestor. O(num_leaves log^2 num_leaves + num_nodes), whatever the depth of the tree.
LeafParts merge_bottom_up(const TokenTree& tree, int64_t budget);

/// Steps of the local search that a tree of so many leaves can use well, and the most that one plan spends:
/// about two seconds.
int64_t search_work(int64_t num_leaves);
inline constexpr int64_t kMaxSearchWork = 24'000'000;

/// The best of the constructions above, improved by local_search.h within `work` steps (0: not at all).
/// No part exceeds the budget, which is at least the longest leaf path. A tree that fits is one part.
/// Deterministic.
LeafParts split_tree(const TokenTree& tree, int64_t budget, int64_t work);

}  // namespace espalier
