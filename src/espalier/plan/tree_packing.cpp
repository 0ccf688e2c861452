// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/tree_packing.h"

#include <algorithm>
#include <numeric>

#include "espalier/plan/bin_packing.h"
#include "espalier/plan/tree_heuristic.h"

namespace espalier {
namespace {

/// Leaves of one tree that are packed together, with their root paths.
struct TreePart {
  int64_t num_tokens;
  std::vector<int64_t> leaves;  // forest nodes, ascending
};

TokenTree token_tree(const Forest& forest, int64_t root) {
  TokenTree tree;
  for (int64_t n = root; n < forest.subtree_last[root]; ++n) {
    tree.parent.push_back(n == root ? -1 : forest.parent[n] - root);
    tree.size.push_back(forest.node_size(n));
  }
  return tree;
}

/// The factor by which the search work of every tree is reduced, so that the plan stays within
/// kMaxSearchWork.
double granted_work(const Forest& forest, int64_t budget) {
  int64_t wanted = 0;
  for (int64_t root = 0; root < forest.num_nodes(); root = forest.subtree_last[root]) {
    const int64_t last = forest.subtree_last[root];
    if (forest.node_begin[last] - forest.node_begin[root] > budget) wanted += search_work(last - root);
  }
  return wanted <= kMaxSearchWork ? 1 : static_cast<double>(kMaxSearchWork) / static_cast<double>(wanted);
}

std::vector<TreePart> forest_parts(const Forest& forest, int64_t budget) {
  const double granted = granted_work(forest, budget);
  std::vector<TreePart> result;
  for (int64_t root = 0; root < forest.num_nodes(); root = forest.subtree_last[root]) {
    const TokenTree tree = token_tree(forest, root);
    const LeafPaths leaves = leaf_paths(tree);
    const double work = granted * static_cast<double>(search_work(leaves.num_leaves()));
    const LeafParts parts = split_tree(tree, budget, static_cast<int64_t>(work));
    const std::vector<int64_t> tokens = part_tokens(leaves, parts);
    for (int64_t p = 0; p < parts.num_rows(); ++p) {
      result.push_back({tokens[p], {}});
      for (const int64_t k : parts.row(p)) result.back().leaves.push_back(root + leaves.node[k]);
    }
  }
  return result;
}

/// Trajectories grouped by the leaf that they go with: their end node, or the first leaf below it.
Csr<int64_t> trajectories_by_leaf(const Forest& forest) {
  std::vector<int64_t> leaf(forest.num_nodes());
  for (int64_t n = forest.num_nodes() - 1; n >= 0; --n) {
    leaf[n] = forest.subtree_last[n] == n + 1 ? n : leaf[n + 1];
  }
  Csr<int64_t> result;
  result.offsets.assign(forest.num_nodes() + 1, 0);
  for (const int64_t end : forest.end_node) ++result.offsets[leaf[end] + 1];
  std::partial_sum(result.offsets.begin(), result.offsets.end(), result.offsets.begin());
  result.values.resize(forest.num_trajectories());
  std::vector<int64_t> at(result.offsets.begin(), result.offsets.end() - 1);
  for (int64_t r = 0; r < forest.num_trajectories(); ++r) result.values[at[leaf[forest.end_node[r]]]++] = r;
  return result;
}

/// Builds micro-batches one after another, reusing its arrays.
class BatchBuilder {
 public:
  explicit BatchBuilder(const Forest& forest)
      : forest_(forest), trajectories_(trajectories_by_leaf(forest)), run_of_(forest.num_nodes(), -1) {}

  /// The micro-batch of the union of the root paths of these leaves.
  MicroBatch build(const std::vector<int64_t>& leaves) {
    std::vector<int64_t> nodes;
    for (const int64_t leaf : leaves) {
      for (int64_t n = leaf; n >= 0 && run_of_[n] < 0; n = forest_.parent[n]) {
        nodes.push_back(n);
        run_of_[n] = 0;
      }
    }
    std::sort(nodes.begin(), nodes.end());
    MicroBatch batch;
    for (const int64_t n : nodes) {
      const int64_t parent = forest_.parent[n] < 0 ? -1 : run_of_[forest_.parent[n]];
      run_of_[n] = static_cast<int64_t>(batch.runs.size());
      batch.runs.push_back({forest_.node_begin[n], forest_.node_begin[n + 1], parent});
    }
    for (const int64_t leaf : leaves) {
      for (const int64_t r : trajectories_.row(leaf)) {
        batch.trajectories.push_back({r, run_of_[forest_.end_node[r]]});
      }
    }
    for (const int64_t n : nodes) run_of_[n] = -1;
    finish_micro_batch(forest_, batch);
    return batch;
  }

 private:
  const Forest& forest_;
  Csr<int64_t> trajectories_;
  std::vector<int64_t> run_of_;  // in the current micro-batch, -1: not in it
};

}  // namespace

std::vector<MicroBatch> pack_trees(const Forest& forest, int64_t budget) {
  const std::vector<TreePart> parts = forest_parts(forest, budget);
  std::vector<int64_t> sizes;
  sizes.reserve(parts.size());
  for (const TreePart& part : parts) sizes.push_back(part.num_tokens);
  BatchBuilder builder(forest);
  std::vector<MicroBatch> batches;
  for (const auto& bin : best_fit_decreasing(sizes, budget)) {
    std::vector<int64_t> leaves;
    for (const int64_t p : bin) leaves.insert(leaves.end(), parts[p].leaves.begin(), parts[p].leaves.end());
    batches.push_back(builder.build(leaves));
  }
  return batches;
}

}  // namespace espalier
