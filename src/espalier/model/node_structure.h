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
  std::vector<int32_t> prev;      // [T] the token before on the path, -1 at the first token of a root
  Csr<int64_t> levels;            // the nodes by depth, roots first; nodes of a level do not see each other
  std::vector<int64_t> context_node;  // [N] of a root that continues the context of other micro-batches: the
                                      // node, of the last ancestor, at whose end it goes on; -1 elsewhere

  int64_t num_tokens() const { return begin.back(); }
  int64_t num_nodes() const { return static_cast<int64_t>(parent.size()); }
};

/// Nodes of these sizes, at least 1 each; parent[n] < n. Roots continue nothing.
NodeStructure make_node_structure(std::vector<int64_t> begin, std::vector<int64_t> parent);

}  // namespace espalier
