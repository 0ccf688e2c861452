// SPDX-License-Identifier: Apache-2.0
// How much the trajectories of a forest share.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "espalier/tree/forest.h"

namespace espalier {

/// Counts of a forest. Append-only merging, which a trainer without trees can do, drops trajectories that
/// another one extends or equals and encodes the others separately. It leaves one trajectory per leaf:
/// trajectories that end at inner nodes are dropped, and duplicates count once. append_only_tokens is the sum
/// of the leaves' path lengths L, and append_only_pairs the sum of L (L + 1) / 2. Equal tokens with different
/// merge keys or tree keys do not extend each other.
struct ForestStatistics {
  int64_t num_trajectories = 0;
  int64_t num_trees = 0;
  int64_t num_nodes = 0;
  int64_t num_leaves = 0;
  int64_t flat_tokens = 0;         // tokens with repetition
  int64_t tree_tokens = 0;         // tokens without repetition
  int64_t append_only_tokens = 0;  // tokens with repetition after append-only merging
  int64_t flat_pairs = 0;          // visible (query, key) pairs of the separate trajectories
  int64_t tree_pairs = 0;          // visible (query, key) pairs in the forest
  int64_t append_only_pairs = 0;   // visible pairs of the trajectories left after append-only merging
  double cached_token_ratio = 1;   // flat / tree
  double por = 0;                  // 1 - tree / flat
  int64_t max_depth_nodes = 0;     // most nodes on a root path
  int64_t max_depth_tokens = 0;    // tokens of the longest trajectory
  double mean_branching = 0;       // children per inner node; 0 if there is none
  int64_t max_branching = 0;
  std::map<int64_t, int64_t> tokens_by_multiplicity;  // multiplicity -> tree tokens
  std::map<int64_t, int64_t> nodes_by_branching;      // number of children -> nodes; leaves at 0
};

/// Linear in the nodes. An empty forest has ratio 1 and POR 0.
ForestStatistics forest_statistics(const Forest& forest);

}  // namespace espalier
