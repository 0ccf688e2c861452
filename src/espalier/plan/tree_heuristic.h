// SPDX-License-Identifier: Apache-2.0
// Tree packing for trees of any size: constructions in nearly linear time, then a local search.
// The problem and its notation are those of leaf_parts.h.
#pragma once

#include "espalier/plan/leaf_parts.h"

namespace espalier {

/// Takes leaves in preorder. Adds each to the current part if it fits, otherwise opens the next part
/// ("initiating a new traversal whenever the accumulated length exceeds capacity", arXiv 2511.00413, section
/// 2.2.2). Linear time.
LeafParts fill_depth_first(const TokenTree& tree, int64_t budget);

/// Merges groups of leaves bottom-up. At each node, deepest first, the groups of its children are packed into
/// bins by best-fit decreasing, so that the longest prefixes are shared first. Two groups g and h that meet
/// at v become one group of U(g) + U(h) - L(v) tokens, so U alone determines what still fits with a group at
/// any ancestor. O(num_leaves log^2 num_leaves + num_nodes), whatever the depth of the tree.
LeafParts merge_bottom_up(const TokenTree& tree, int64_t budget);

/// Useful steps of the local search for a tree with this many leaves, and the maximum per plan (about two
/// seconds).
int64_t search_work(int64_t num_leaves);
inline constexpr int64_t kMaxSearchWork = 24'000'000;

/// The best of the constructions above, improved by local_search.h within `work` steps (0: not improved).
/// No part exceeds the budget, which must be at least the longest leaf path. A tree that fits is one part.
/// Deterministic.
LeafParts split_tree(const TokenTree& tree, int64_t budget, int64_t work);

// Tree packing with one shared path per part, by dynamic programming:
// "Tree Training" (arXiv 2511.00413), section 2.2.1, equations 3 to 5. A part is all leaves below one node u:
// the path to u is encoded once, and the path from u to every leaf is encoded separately. With n_u leaves
// below u and R(u) = sum over them of L(leaf) - L(u):
//   feasible(u)  iff  L(u) + R(u) <= C                                                    (3)
//   saving(u)    =    (n_u - 1) L(u)                                                      (4)
//   DP(u)        =    max( saving(u) if feasible(u), sum of DP(c) over the children c ),  (5)
// and DP(leaf) = 0. The cost is the tokens of all leaf paths minus DP(root).
struct SinglePathPacking {
  LeafParts parts;
  int64_t total_tokens;  // residual paths counted without sharing, so at least total_tokens(leaves, parts)
};

/// The optimum among packings with one shared path per part. `budget` must be at least the longest leaf path.
/// Ties go to the node nearer to the root (fewer parts). Linear time.
SinglePathPacking pack_single_path(const TokenTree& tree, int64_t budget);

}  // namespace espalier
