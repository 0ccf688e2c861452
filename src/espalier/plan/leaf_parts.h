// SPDX-License-Identifier: Apache-2.0
// The problem that tree packing solves, and code that its solvers share.
//
// "Tree Training" (arXiv 2511.00413), section 2.2, in this project's terms: a tree with |v| tokens in node v;
// L(v) = sum of |u| over the root path of v, v included; a budget C. Assign the leaves to parts P_1 ... P_k
// such that the union of the root paths of each part fits, and minimise the encoded tokens:
//   U(P) = sum of |v| over the nodes v on the root path of some leaf of P <= C,   minimise sum_i U(P_i).
// Every part is an independent sequence tree, so what is shared across parts is encoded again. A trajectory
// that ends at an inner node costs nothing, because some part encodes its node anyway.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/base/csr.h"

namespace espalier {

/// One tree, nodes in preorder: parent[0] == -1, parent[n] < n, and a node's descendants follow it directly.
struct TokenTree {
  std::vector<int64_t> parent;
  std::vector<int64_t> size;  // tokens of the node, at least 1

  int64_t num_nodes() const { return static_cast<int64_t>(parent.size()); }
  int64_t num_tokens() const;
  /// In preorder a node's first child, if it has one, is the next node.
  bool is_leaf(int64_t n) const { return n + 1 == num_nodes() || parent[n + 1] != n; }
};

/// L(n) for every node: tokens of its root path, itself included.
std::vector<int64_t> path_lengths(const TokenTree& tree);

/// The leaves in preorder. `path` and `shared` determine every U(P): if leaf b follows leaf a within a part,
/// b adds path[b] - min(shared[a + 1], ..., shared[b]) tokens to it.
struct LeafPaths {
  std::vector<int64_t> node;    // [num_leaves]
  std::vector<int64_t> path;    // [num_leaves] L(leaf)
  std::vector<int64_t> shared;  // [num_leaves] L(deepest node shared with the leaf before), 0 at the first

  int64_t num_leaves() const { return static_cast<int64_t>(node.size()); }
};
LeafPaths leaf_paths(const TokenTree& tree);

/// Parts as rows of leaf indices (0, 1, ... in preorder). Indices ascend within a row, and rows are sorted by
/// their first leaf.
using LeafParts = Csr<int64_t>;

/// Turns a part number per leaf (any numbers in [0, num_leaves)) into parts. Numbers without leaves are
/// dropped.
LeafParts parts_from_labels(const std::vector<int64_t>& label);

/// U of each part. O(num_leaves log num_leaves), whatever the depth of the tree.
std::vector<int64_t> part_tokens(const LeafPaths& leaves, const LeafParts& parts);

/// The sum of U over the parts: what the plan encodes.
int64_t total_tokens(const LeafPaths& leaves, const LeafParts& parts);

}  // namespace espalier
