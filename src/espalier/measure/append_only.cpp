// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/append_only.h"

#include <vector>

#include "espalier/base/check.h"
#include "espalier/data/builder.h"

namespace espalier {

Trajectories merge_append_only(const Trajectories& trajectories, const Forest& forest) {
  ESPALIER_ASSERT(forest.num_trajectories() == trajectories.num_rows());
  // In preorder a node's first child is the next node, so they have the same first leaf.
  std::vector<int64_t> first_leaf(forest.num_nodes());
  for (int64_t node = forest.num_nodes() - 1; node >= 0; --node) {
    const bool is_leaf = forest.subtree_last[node] == node + 1;
    first_leaf[node] = is_leaf ? node : first_leaf[node + 1];
  }
  std::vector<TrajectoryRow> row_of_leaf(forest.num_nodes());
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    const int64_t leaf = first_leaf[forest.end_node[row]];
    TrajectoryRow& merged = row_of_leaf[leaf];
    merged.loss_weights.resize(forest.position[leaf] + forest.node_size(leaf));
    const auto tokens = trajectories.row(row);
    if (forest.end_node[row] == leaf) merged.input_ids.assign(tokens.begin(), tokens.end());
    for (int64_t t = 0; t < std::ssize(tokens); ++t) {
      merged.loss_weights[t] += trajectories.loss_weights[trajectories.offsets[row] + t];
    }
  }
  TrajectoriesBuilder builder;
  for (const TrajectoryRow& row : row_of_leaf) {
    if (!row.input_ids.empty()) builder.append(row);
  }
  return builder.finish();
}

}  // namespace espalier
