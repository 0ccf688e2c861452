// What sharing there is in a forest.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "espalier/tree/forest.h"

namespace espalier {

struct ForestStatistics {
  int64_t num_trajectories = 0;
  int64_t num_trees = 0;
  int64_t num_nodes = 0;
  int64_t num_leaves = 0;
  int64_t flat_tokens = 0;         // tokens with repetition
  int64_t tree_tokens = 0;         // tokens without repetition
  int64_t append_only_tokens = 0;  // tokens left when trajectories that another one extends are dropped
  int64_t flat_pairs = 0;          // visible (query, key) pairs of the trajectories on their own
  int64_t tree_pairs = 0;          // visible (query, key) pairs in the forest
  int64_t append_only_pairs = 0;
  double cached_token_ratio = 1;      // flat / tree
  double por = 0;                     // 1 - tree / flat
  int64_t max_depth_nodes = 0;        // nodes on the longest root path, counted in nodes
  int64_t max_depth_tokens = 0;       // tokens of the longest trajectory
  double mean_branching = 0;          // children per inner node that has any
  int64_t max_branching = 0;
  std::map<int64_t, int64_t> tokens_by_multiplicity;  // multiplicity -> tree tokens
  std::map<int64_t, int64_t> nodes_by_branching;      // number of children -> nodes
};

ForestStatistics forest_statistics(const Forest& forest);

}  // namespace espalier
