// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/leaf_parts.h"

#include <algorithm>
#include <numeric>

namespace espalier {

int64_t TokenTree::num_tokens() const {
  return std::accumulate(size.begin(), size.end(), int64_t{0});
}

std::vector<int64_t> path_lengths(const TokenTree& tree) {
  std::vector<int64_t> length(tree.size);
  for (int64_t n = 1; n < tree.num_nodes(); ++n) length[n] += length[tree.parent[n]];
  return length;
}

LeafPaths leaf_paths(const TokenTree& tree) {
  const std::vector<int64_t> length = path_lengths(tree);
  LeafPaths leaves;
  int64_t shared = 0;
  for (int64_t n = 0; n < tree.num_nodes(); ++n) {
    if (!tree.is_leaf(n)) continue;
    leaves.node.push_back(n);
    leaves.path.push_back(length[n]);
    leaves.shared.push_back(shared);
    // The node after a leaf in preorder hangs on the deepest node that this leaf shares with the next.
    if (n + 1 < tree.num_nodes()) shared = length[tree.parent[n + 1]];
  }
  return leaves;
}

LeafParts parts_from_labels(const std::vector<int64_t>& label) {
  const auto num_leaves = static_cast<int64_t>(label.size());
  std::vector<int64_t> row(num_leaves, -1);
  std::vector<int64_t> count;
  for (const int64_t l : label) {
    if (row[l] < 0) {
      row[l] = static_cast<int64_t>(count.size());
      count.push_back(0);
    }
    ++count[row[l]];
  }
  LeafParts parts;
  parts.offsets.reserve(count.size() + 1);
  for (const int64_t c : count) parts.offsets.push_back(parts.offsets.back() + c);
  parts.values.resize(num_leaves);
  std::vector<int64_t> at(parts.offsets.begin(), parts.offsets.end() - 1);
  for (int64_t k = 0; k < num_leaves; ++k) parts.values[at[row[label[k]]]++] = k;
  return parts;
}

std::vector<int64_t> part_tokens(const LeafPaths& leaves, const LeafParts& parts) {
  std::vector<int64_t> part_of(leaves.num_leaves(), 0);
  for (int64_t p = 0; p < parts.num_rows(); ++p) {
    for (const int64_t k : parts.row(p)) part_of[k] = p;
  }
  std::vector<int64_t> tokens(parts.num_rows(), 0), last(parts.num_rows(), -1);
  std::vector<int64_t> minima;  // leaves whose `shared` is below that of every later leaf seen so far
  for (int64_t k = 0; k < leaves.num_leaves(); ++k) {
    while (!minima.empty() && leaves.shared[minima.back()] >= leaves.shared[k]) minima.pop_back();
    minima.push_back(k);
    const int64_t p = part_of[k];
    tokens[p] += leaves.path[k];
    if (last[p] >= 0) {
      tokens[p] -= leaves.shared[*std::upper_bound(minima.begin(), minima.end(), last[p])];
    }
    last[p] = k;
  }
  return tokens;
}

int64_t total_tokens(const LeafPaths& leaves, const LeafParts& parts) {
  const std::vector<int64_t> tokens = part_tokens(leaves, parts);
  return std::accumulate(tokens.begin(), tokens.end(), int64_t{0});
}

}  // namespace espalier
