#include "espalier/plan/tree_packing.h"

#include <algorithm>
#include <numeric>

#include "espalier/plan/bin_packing.h"

namespace espalier {
namespace {

/// What is kept together: some trajectories of one tree and the nodes of their paths.
struct Part {
  std::vector<int64_t> nodes;         // ascending
  std::vector<int64_t> trajectories;  // in preorder of their end nodes
  int64_t num_tokens = 0;
};

/// Trajectories sorted by end node, those of one node ascending.
std::vector<int64_t> trajectories_in_preorder(const Forest& forest) {
  std::vector<int64_t> begin(forest.num_nodes() + 1, 0);
  for (const int64_t n : forest.end_node) ++begin[n + 1];
  std::partial_sum(begin.begin(), begin.end(), begin.begin());
  std::vector<int64_t> sorted(forest.num_trajectories());
  for (int64_t r = 0; r < forest.num_trajectories(); ++r) sorted[begin[forest.end_node[r]]++] = r;
  return sorted;
}

/// Fills parts depth first. A trajectory goes to the current part while the nodes that it adds fit the budget
/// and the tree is the same; otherwise it opens the next part, which repeats its path. A tree that fits is
/// therefore one part. In preorder the nodes that a trajectory adds come after all nodes of the part.
std::vector<Part> tree_parts(const Forest& forest, int64_t budget) {
  std::vector<Part> parts;
  std::vector<int64_t> part_of(forest.num_nodes(), -1);  // the last part that holds the node
  std::vector<int64_t> added;
  int64_t tree_last = 0;  // one past the last node of the current tree
  for (const int64_t r : trajectories_in_preorder(forest)) {
    const int64_t end = forest.end_node[r];
    const auto path_outside = [&](int64_t part) {
      added.clear();
      int64_t tokens = 0;
      for (int64_t n = end; n >= 0 && part_of[n] != part; n = forest.parent[n]) {
        added.push_back(n);
        tokens += forest.node_size(n);
      }
      return tokens;
    };
    auto part = static_cast<int64_t>(parts.size()) - 1;
    int64_t tokens = part < 0 ? 0 : path_outside(part);
    const bool new_tree = end >= tree_last;
    if (new_tree || parts[part].num_tokens + tokens > budget) {
      parts.emplace_back();
      tokens = path_outside(++part);
      if (new_tree) tree_last = forest.subtree_last[added.back()];
    }
    for (const int64_t n : added) part_of[n] = part;
    parts[part].nodes.insert(parts[part].nodes.end(), added.rbegin(), added.rend());
    parts[part].trajectories.push_back(r);
    parts[part].num_tokens += tokens;
  }
  return parts;
}

}  // namespace

std::vector<MicroBatch> pack_trees(const Forest& forest, int64_t budget) {
  const std::vector<Part> parts = tree_parts(forest, budget);
  std::vector<int64_t> sizes;
  sizes.reserve(parts.size());
  for (const Part& part : parts) sizes.push_back(part.num_tokens);
  std::vector<MicroBatch> batches;
  std::vector<int64_t> run_of(forest.num_nodes());  // in the current micro-batch
  for (const auto& bin : best_fit_decreasing(sizes, budget)) {
    // Parts of one tree that meet in a micro-batch share their prefixes again.
    std::vector<int64_t> nodes;
    for (const int64_t p : bin) nodes.insert(nodes.end(), parts[p].nodes.begin(), parts[p].nodes.end());
    std::sort(nodes.begin(), nodes.end());
    nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());

    MicroBatch& batch = batches.emplace_back();
    for (const int64_t n : nodes) {
      const int64_t parent = forest.parent[n] < 0 ? -1 : run_of[forest.parent[n]];
      run_of[n] = static_cast<int64_t>(batch.runs.size());
      batch.runs.push_back({forest.node_begin[n], forest.node_begin[n + 1], parent});
    }
    for (const int64_t p : bin) {
      for (const int64_t r : parts[p].trajectories) {
        batch.trajectories.push_back({r, run_of[forest.end_node[r]]});
      }
    }
    finish_micro_batch(forest, batch);
  }
  return batches;
}

}  // namespace espalier
