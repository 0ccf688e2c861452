// SPDX-License-Identifier: Apache-2.0
#include "espalier/tree/statistics.h"

#include <algorithm>

namespace espalier {
namespace {

/// Visible pairs of `size` consecutive tokens, the first of them at `position`.
int64_t run_pairs(int64_t position, int64_t size) {
  return size * position + size * (size + 1) / 2;
}

void count_branching(const Forest& forest, ForestStatistics& statistics) {
  std::vector<int64_t> children(forest.num_nodes(), 0), depth(forest.num_nodes(), 1);
  for (int64_t n = 0; n < forest.num_nodes(); ++n) {
    if (forest.parent[n] < 0) {
      ++statistics.num_trees;
    } else {
      ++children[forest.parent[n]];
      depth[n] = depth[forest.parent[n]] + 1;
    }
    statistics.max_depth_nodes = std::max(statistics.max_depth_nodes, depth[n]);
  }
  for (const int64_t count : children) {
    ++statistics.nodes_by_branching[count];
    statistics.max_branching = std::max(statistics.max_branching, count);
    statistics.num_leaves += count == 0;
  }
  const int64_t inner = statistics.num_nodes - statistics.num_leaves;
  if (inner > 0) {
    statistics.mean_branching =
        static_cast<double>(statistics.num_nodes - statistics.num_trees) / static_cast<double>(inner);
  }
}

void count_tokens(const Forest& forest, ForestStatistics& statistics) {
  for (int64_t n = 0; n < forest.num_nodes(); ++n) {
    const int64_t position = forest.position[n], size = forest.node_size(n);
    statistics.flat_tokens += forest.multiplicity[n] * size;
    statistics.flat_pairs += forest.multiplicity[n] * run_pairs(position, size);
    statistics.tree_pairs += run_pairs(position, size);
    statistics.tokens_by_multiplicity[forest.multiplicity[n]] += size;
    statistics.max_depth_tokens = std::max(statistics.max_depth_tokens, position + size);
    const bool leaf = forest.subtree_last[n] == n + 1;
    if (leaf) {
      statistics.append_only_tokens += position + size;
      statistics.append_only_pairs += run_pairs(0, position + size);
    }
  }
}

}  // namespace

ForestStatistics forest_statistics(const Forest& forest) {
  ForestStatistics statistics;
  statistics.num_trajectories = forest.num_trajectories();
  statistics.num_nodes = forest.num_nodes();
  statistics.tree_tokens = forest.tree_tokens();
  count_branching(forest, statistics);
  count_tokens(forest, statistics);
  if (statistics.tree_tokens > 0) {
    const auto flat = static_cast<double>(statistics.flat_tokens);
    const auto tree = static_cast<double>(statistics.tree_tokens);
    statistics.cached_token_ratio = flat / tree;
    statistics.por = 1 - tree / flat;
  }
  return statistics;
}

}  // namespace espalier
