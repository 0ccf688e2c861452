// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/node_structure.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "espalier/base/check.h"

namespace espalier {
namespace {

Csr<int64_t> nodes_by_depth(const std::vector<int64_t>& parent) {
  std::vector<int64_t> depth(parent.size());
  int64_t num_levels = 0;
  for (size_t n = 0; n < parent.size(); ++n) {
    depth[n] = parent[n] < 0 ? 0 : depth[parent[n]] + 1;
    num_levels = std::max(num_levels, depth[n] + 1);
  }
  return grouped(depth, num_levels);
}

}  // namespace

NodeStructure make_node_structure(std::vector<int64_t> begin, std::vector<int64_t> parent) {
  ESPALIER_ASSERT(begin.size() == parent.size() + 1 && begin.front() == 0);
  NodeStructure nodes;
  nodes.begin = std::move(begin);
  nodes.parent = std::move(parent);
  nodes.prev.resize(nodes.num_tokens());
  for (int64_t n = 0; n < nodes.num_nodes(); ++n) {
    const int64_t first = nodes.begin[n], before = nodes.parent[n];
    ESPALIER_ASSERT(first < nodes.begin[n + 1] && before < n);
    std::iota(nodes.prev.begin() + first, nodes.prev.begin() + nodes.begin[n + 1],
              static_cast<int32_t>(first) - 1);
    nodes.prev[first] = before < 0 ? -1 : static_cast<int32_t>(nodes.begin[before + 1] - 1);
  }
  nodes.levels = nodes_by_depth(nodes.parent);
  return nodes;
}

Paths::Paths(const NodeStructure& nodes) : prev(at::tensor(nodes.prev, at::kInt)) {
  std::vector<int64_t> last;
  for (const int64_t node : nodes.cuts) last.push_back(nodes.begin[node + 1] - 1);
  ends = at::tensor(last, at::kLong);
}

}  // namespace espalier
