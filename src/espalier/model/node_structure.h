// SPDX-License-Identifier: Apache-2.0
// How the tokens of a list branch, as layers that walk along paths need it.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/base/csr.h"

namespace espalier {

/// T tokens in N nodes, in preorder. A node is a stretch of tokens that follow each other on one path. It
/// continues where its parent ends. A plain sequence is one node.
struct NodeStructure {
  std::vector<int64_t> begin{0};  // [N + 1] node n is tokens [begin[n], begin[n + 1])
  std::vector<int64_t> parent;    // [N], -1 at a root
  std::vector<int32_t> prev;      // [T] the token before on the path; at the first token of a root -1, or
                                  // -2 - c where it goes on from cut c of the last ancestor (ops/paths.h)
  Csr<int64_t> levels;            // the nodes by depth, roots first; nodes of a level do not see each other
  std::vector<int64_t> cuts;      // the nodes at whose ends roots of other micro-batches go on, ascending

  int64_t num_tokens() const { return begin.back(); }
  int64_t num_nodes() const { return static_cast<int64_t>(parent.size()); }
};

/// Nodes of these sizes, at least 1 each; parent[n] < n. Roots continue nothing, and nothing continues them.
NodeStructure make_node_structure(std::vector<int64_t> begin, std::vector<int64_t> parent);

}  // namespace espalier
