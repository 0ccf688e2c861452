// SPDX-License-Identifier: Apache-2.0
// Tree packing with one shared path per part, by dynamic programming.
//
// "Tree Training" (arXiv 2511.00413), section 2.2.1, equations 3 to 5. A part is all leaves below one node u:
// the path to u is encoded once, and the path from u to every leaf is encoded separately. With n_u leaves
// below u and R(u) = sum over them of L(leaf) - L(u):
//   feasible(u)  iff  L(u) + R(u) <= C                                                    (3)
//   saving(u)    =    (n_u - 1) L(u)                                                      (4)
//   DP(u)        =    max( saving(u) if feasible(u), sum of DP(c) over the children c ),  (5)
// and DP(leaf) = 0. The cost is the tokens of all leaf paths minus DP(root).
#pragma once

#include "espalier/plan/leaf_parts.h"

namespace espalier {

struct SinglePathPacking {
  LeafParts parts;
  int64_t total_tokens;  // residual paths counted without sharing, so at least total_tokens(leaves, parts)
};

/// The optimum among packings with one shared path per part. `budget` must be at least the longest leaf path.
/// Ties go to the node nearer to the root (fewer parts). Linear time.
SinglePathPacking pack_single_path(const TokenTree& tree, int64_t budget);

}  // namespace espalier
