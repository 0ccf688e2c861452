// Tree packing solved exactly, for small trees: the ground truth of the heuristics.
//
// "Tree Training" (arXiv 2511.00413), section 2.2.2, equations 6 to 11, with states made exact. A state of
// node v is the descending vector of the loads of the parts that visit the subtree of v; a load counts the
// part's tokens inside the subtree, v included.
//   leaf:     the one state (|v|).
//   combine:  a state of each child; a part takes at most one load from each child (two loads of one child
//   are
//             two parts by definition of the child's state), loads taken together add up.
//   lift:     |v| is added to every load.
//   feasible: load + L(parent(v)) <= C, since the part also holds the root path.
// Cost needs no place in the state: at the root a load is U(P), so the cost is the sum of the vector.
// A state is dropped when another has no more loads and each is no larger (whatever completes the one also
// completes the other), and when its lower bound
//   sum of loads + (number of loads) L(parent(v)) + tokens that lie neither on the root path nor in the
//   subtree
// exceeds a cost that is known to be reachable: each load is a part that needs the root path of its own.
#pragma once

#include <limits>
#include <optional>

#include "espalier/plan/leaf_parts.h"

namespace espalier {

struct MultiPathOptions {
  /// Only packings of at most this many tokens are looked for; a good value saves most of the work.
  int64_t upper_bound = std::numeric_limits<int64_t>::max();
  /// Steps after which to give up; about ten million a second.
  int64_t work_limit = 20'000'000;
};

enum class MultiPathOutcome { kSolved, kNothingWithinBound, kGaveUp };

struct MultiPathPacking {
  MultiPathOutcome outcome;
  LeafParts parts;           // an optimum, when solved
  int64_t total_tokens = 0;  // its cost
  int64_t work = 0;          // steps spent
};

/// A packing of the fewest tokens. Exponential in the worst case: gives up at the work limit, and where a
/// subtree is visited by more than 64 parts. `budget` is at least the longest leaf path. Deterministic.
MultiPathPacking pack_multi_path(const TokenTree& tree, int64_t budget, const MultiPathOptions& options = {});

}  // namespace espalier
