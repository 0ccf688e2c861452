// SPDX-License-Identifier: Apache-2.0
// Exact tree packing for small trees, the reference for the heuristics.
//
// "Tree Training" (arXiv 2511.00413), section 2.2.2, equations 6 to 11, with states made exact. A state of
// node v is the descending vector of the loads of the parts that visit the subtree of v; a load counts the
// part's tokens inside the subtree, v included.
//   leaf:     the one state (|v|).
//   combine:  takes one state of each child; a part takes at most one load from each child (two loads of one
//             child are two parts, by the definition of a state); loads that a part takes add up.
//   lift:     |v| is added to every load.
//   feasible: load + L(parent(v)) <= C, since the part also holds the root path.
// Cost needs no place in the state: at the root a load is U(P), so the cost is the sum of the vector.
// A state is dropped if another one has at most as many loads and each of them is no larger, because every
// completion of the one also completes the other. It is also dropped if its lower bound
//   sum of loads + (number of loads) L(parent(v)) + tokens that lie neither on the root path nor in the
//   subtree
// exceeds a cost that is known to be reachable. (Each load is a part, which needs its own root path.)
#pragma once

#include <limits>

#include "espalier/plan/leaf_parts.h"

namespace espalier {

struct MultiPathOptions {
  /// Only packings of at most this many tokens are searched. A tight bound saves most of the work.
  int64_t upper_bound = std::numeric_limits<int64_t>::max();
  /// The search stops after this many steps (about ten million per second).
  int64_t work_limit = 20'000'000;
};

enum class MultiPathOutcome { kSolved, kNothingWithinBound, kGaveUp };

struct MultiPathPacking {
  MultiPathOutcome outcome;
  LeafParts parts;           // an optimum, when solved
  int64_t total_tokens = 0;  // its cost
  int64_t work = 0;          // steps spent
};

/// Finds a packing of the fewest tokens. The search is exponential in the worst case. It stops unsolved at
/// the work limit, and if more than 64 parts visit a subtree. `budget` must be at least the longest leaf
/// path. Deterministic.
MultiPathPacking pack_multi_path(const TokenTree& tree, int64_t budget, const MultiPathOptions& options = {});

}  // namespace espalier
