// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/single_path.h"

#include <numeric>

#include "espalier/base/check.h"

namespace espalier {

SinglePathPacking pack_single_path(const TokenTree& tree, int64_t budget) {
  const std::vector<int64_t> length = path_lengths(tree);
  const int64_t num_nodes = tree.num_nodes();
  // Sums over the leaves below each node. `saving` sums the children's DP until the node itself is visited.
  std::vector<int64_t> num_leaves(num_nodes, 0), leaf_tokens(num_nodes, 0), saving(num_nodes, 0);
  std::vector<bool> is_shared(num_nodes, false);
  for (int64_t n = num_nodes - 1; n >= 0; --n) {
    if (tree.is_leaf(n)) {
      ESPALIER_ASSERT(length[n] <= budget);
      num_leaves[n] = 1;
      leaf_tokens[n] = length[n];
    }
    const int64_t own = (num_leaves[n] - 1) * length[n];
    // L(u) + R(u) = leaf tokens - saving
    if (leaf_tokens[n] - own <= budget && own >= saving[n]) {
      saving[n] = own;
      is_shared[n] = true;
    }
    if (const int64_t p = tree.parent[n]; p >= 0) {
      num_leaves[p] += num_leaves[n];
      leaf_tokens[p] += leaf_tokens[n];
      saving[p] += saving[n];
    }
  }
  std::vector<int64_t> label, group(num_nodes, -1);  // the part of all leaves below a chosen node, else -1
  int64_t num_groups = 0;
  for (int64_t n = 0; n < num_nodes; ++n) {
    if (n > 0) group[n] = group[tree.parent[n]];
    if (group[n] < 0 && is_shared[n]) group[n] = num_groups++;
    if (tree.is_leaf(n)) label.push_back(group[n]);
  }
  return {parts_from_labels(label), num_nodes == 0 ? 0 : leaf_tokens[0] - saving[0]};
}

}  // namespace espalier
