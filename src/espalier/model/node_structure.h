// SPDX-License-Identifier: Apache-2.0
// The tree structure of tokens, for recurrent layers and convolutions.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "espalier/base/csr.h"

namespace espalier {

/// T tokens in N nodes, in preorder. A node is a contiguous range of tokens on one path that starts where its
/// parent ends. A plain sequence is one node.
struct NodeStructure {
  std::vector<int64_t> begin{0};  // [N + 1] node n is tokens [begin[n], begin[n + 1])
  std::vector<int64_t> parent;    // [N], -1 at a root
  std::vector<int32_t> prev;      // [T] previous token on the path; at the start of a root -1, or
                                  // -2 - c if it continues cut c of the last ancestor (ops/paths.h)
  Csr<int64_t> levels;            // nodes by depth, roots first; nodes of a level are independent
  std::vector<int64_t> cuts;      // nodes whose ends are continued by other micro-batches, ascending

  int64_t num_tokens() const { return begin.back(); }
  int64_t num_nodes() const { return static_cast<int64_t>(parent.size()); }
};

/// Builds the structure. Nodes must not be empty; parent[n] < n. Roots have no context, and there are no
/// cuts.
NodeStructure make_node_structure(std::vector<int64_t> begin, std::vector<int64_t> parent);

/// The structure as arguments of recurrent operators. Copies it, because the graph outlives the sequence.
struct Paths {
  at::Tensor prev;  // [T] int32: NodeStructure::prev
  at::Tensor ends;  // [C] int64: the last token of each of NodeStructure::cuts

  explicit Paths(const NodeStructure& nodes);
};

}  // namespace espalier
