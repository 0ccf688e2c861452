// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/packing.h"

#include <algorithm>
#include <numeric>
#include <queue>
#include <set>
#include <utility>

#include "espalier/base/interrupt.h"
#include "espalier/plan/tree_heuristic.h"

namespace espalier {

std::vector<std::vector<int64_t>> best_fit_decreasing(const std::vector<int64_t>& sizes, int64_t capacity) {
  std::vector<int64_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return sizes[a] > sizes[b]; });
  std::vector<std::vector<int64_t>> bins;
  std::set<std::pair<int64_t, int64_t>> open;  // (free tokens, bin)
  for (const int64_t item : order) {
    check_interrupt();
    const auto fit = open.lower_bound({sizes[item], 0});
    std::pair<int64_t, int64_t> bin{capacity, static_cast<int64_t>(bins.size())};
    if (fit == open.end()) {
      bins.emplace_back();
    } else {
      bin = *fit;
      open.erase(fit);
    }
    bins[bin.second].push_back(item);
    if (bin.first > sizes[item]) open.emplace(bin.first - sizes[item], bin.second);
  }
  for (auto& bin : bins) std::sort(bin.begin(), bin.end());
  return bins;
}

namespace {

struct Set {
  double sum = 0;
  std::vector<int64_t> indices;
};

// The sets that are not empty, the largest sum first.
struct Division {
  std::vector<Set> sets;
  double difference;  // of the largest and the smallest sum, empty sets included
  int64_t first;      // index, by which ties are decided

  bool operator<(const Division& other) const {
    return difference != other.difference ? difference < other.difference : first > other.first;
  }
};

Division division_of(std::vector<Set> sets, size_t num_sets, int64_t first) {
  std::stable_sort(sets.begin(), sets.end(), [](const Set& a, const Set& b) { return a.sum > b.sum; });
  const double smallest = sets.size() < num_sets ? 0 : sets.back().sum;
  const double difference = sets.front().sum - smallest;
  return {std::move(sets), difference, first};
}

Division join(Division a, Division b, size_t num_sets) {
  std::vector<Set> sets = std::move(a.sets);
  sets.resize(num_sets);
  for (size_t i = 0; i < b.sets.size(); ++i) {
    Set& set = sets[num_sets - 1 - i];
    set.sum += b.sets[i].sum;
    set.indices.insert(set.indices.end(), b.sets[i].indices.begin(), b.sets[i].indices.end());
  }
  std::erase_if(sets, [](const Set& set) { return set.indices.empty(); });
  return division_of(std::move(sets), num_sets, std::min(a.first, b.first));
}

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
  const std::vector<int64_t> first = first_leaves(forest);
  std::vector<int64_t> leaf;
  leaf.reserve(forest.end_node.size());
  for (const int64_t end : forest.end_node) leaf.push_back(first[end]);
  return grouped(leaf, forest.num_nodes());
}

/// Builds micro-batches one after another, reusing its arrays.
class BatchBuilder {
 public:
  explicit BatchBuilder(const Forest& forest)
      : forest_(forest), trajectories_(trajectories_by_leaf(forest)), run_of_(forest.num_nodes(), -1) {}

  /// Appends the union of the root paths of these leaves.
  void append(std::span<const int64_t> leaves, MicroBatch* batch) {
    std::vector<int64_t> nodes;
    for (const int64_t leaf : leaves) {
      for (int64_t n = leaf; n >= 0 && run_of_[n] < 0; n = forest_.parent[n]) {
        nodes.push_back(n);
        run_of_[n] = 0;
      }
    }
    std::sort(nodes.begin(), nodes.end());
    for (const int64_t n : nodes) {
      const int64_t parent = forest_.parent[n] < 0 ? -1 : run_of_[forest_.parent[n]];
      run_of_[n] = static_cast<int64_t>(batch->runs.size());
      batch->runs.push_back({forest_.node_begin[n], forest_.node_begin[n + 1], parent});
    }
    for (const int64_t leaf : leaves) {
      for (const int64_t r : trajectories_.row(leaf)) {
        batch->trajectories.push_back({r, run_of_[forest_.end_node[r]]});
      }
    }
    for (const int64_t n : nodes) run_of_[n] = -1;
  }

 private:
  const Forest& forest_;
  Csr<int64_t> trajectories_;
  std::vector<int64_t> run_of_;  // in the current micro-batch, -1: not in it
};

/// For each node the topmost node of the stretch of its root path whose forest tokens are contiguous.
std::vector<int64_t> stretch_tops(const Forest& forest) {
  std::vector<int64_t> top(forest.num_nodes());
  for (int64_t n = 0; n < forest.num_nodes(); ++n) {
    top[n] = n > 0 && forest.parent[n] == n - 1 ? top[n - 1] : n;
  }
  return top;
}

/// Appends the trajectory's path as a chain of runs, one per stretch.
void append_chain(const Forest& forest, const std::vector<int64_t>& top, int64_t trajectory,
                  MicroBatch* batch) {
  const auto first = static_cast<int64_t>(batch->runs.size());
  for (int64_t n = forest.end_node[trajectory]; n >= 0; n = forest.parent[top[n]]) {
    batch->runs.push_back({forest.node_begin[top[n]], forest.node_begin[n + 1], -1});
  }
  std::reverse(batch->runs.begin() + first, batch->runs.end());
  const auto last = static_cast<int64_t>(batch->runs.size()) - 1;
  for (int64_t k = first + 1; k <= last; ++k) batch->runs[k].parent = k - 1;
  batch->trajectories.push_back({trajectory, last});
}

/// A micro-batch for every bin, to which `append(items, micro-batch)` adds its items.
template <typename Append>
std::vector<MicroBatch> pack(const Forest& forest, const std::vector<int64_t>& sizes, int64_t budget,
                             const Append& append) {
  std::vector<MicroBatch> batches;
  for (const auto& bin : best_fit_decreasing(sizes, budget)) {
    append(bin, &batches.emplace_back());
    finish_micro_batch(forest, batches.back());
  }
  return batches;
}

}  // namespace

std::vector<std::vector<int64_t>> largest_differencing(std::span<const double> numbers, int64_t num_sets) {
  std::priority_queue<Division> open;
  const auto sets = static_cast<size_t>(num_sets);
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    open.push(division_of({Set{numbers[i], {index}}}, sets, index));
  }
  const auto take = [&] {
    Division division = open.top();
    open.pop();
    return division;
  };
  while (open.size() > 1) {
    Division largest = take();
    Division next = take();
    open.push(join(std::move(largest), std::move(next), sets));
  }
  std::vector<std::vector<int64_t>> result(sets);
  if (open.empty()) return result;
  const Division division = take();
  for (size_t i = 0; i < division.sets.size(); ++i) {
    result[i] = division.sets[i].indices;
    std::sort(result[i].begin(), result[i].end());
  }
  return result;
}

std::vector<MicroBatch> pack_trees(const Forest& forest, int64_t budget) {
  const std::vector<TreePart> parts = forest_parts(forest, budget);
  std::vector<int64_t> sizes;
  sizes.reserve(parts.size());
  for (const TreePart& part : parts) sizes.push_back(part.num_tokens);
  BatchBuilder builder(forest);
  return pack(forest, sizes, budget, [&](const std::vector<int64_t>& bin, MicroBatch* batch) {
    std::vector<int64_t> leaves;
    for (const int64_t p : bin) leaves.insert(leaves.end(), parts[p].leaves.begin(), parts[p].leaves.end());
    builder.append(leaves, batch);
  });
}

std::vector<MicroBatch> pack_leaf_paths(const Forest& forest, int64_t budget) {
  std::vector<int64_t> leaves, sizes;
  for (int64_t n = 0; n < forest.num_nodes(); ++n) {
    if (forest.subtree_last[n] > n + 1) continue;
    leaves.push_back(n);
    sizes.push_back(forest.position[n] + forest.node_size(n));
  }
  BatchBuilder builder(forest);
  return pack(forest, sizes, budget, [&](const std::vector<int64_t>& bin, MicroBatch* batch) {
    for (const int64_t k : bin) builder.append({&leaves[k], 1}, batch);
  });
}

std::vector<MicroBatch> pack_sequences(const Forest& forest, int64_t budget) {
  std::vector<int64_t> sizes;
  sizes.reserve(forest.num_trajectories());
  for (int64_t r = 0; r < forest.num_trajectories(); ++r) sizes.push_back(forest.trajectory_size(r));
  const std::vector<int64_t> top = stretch_tops(forest);
  return pack(forest, sizes, budget, [&](const std::vector<int64_t>& bin, MicroBatch* batch) {
    for (const int64_t r : bin) append_chain(forest, top, r, batch);
  });
}

}  // namespace espalier
