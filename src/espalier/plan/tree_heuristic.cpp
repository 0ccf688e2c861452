// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/tree_heuristic.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/plan/local_search.h"

namespace espalier {
namespace {

/// Disjoint groups of leaves that can only be joined (union-find).
class Groups {
 public:
  explicit Groups(int64_t count) : next_(count) { std::iota(next_.begin(), next_.end(), 0); }
  int64_t find(int64_t g) {
    while (next_[g] != g) g = next_[g] = next_[next_[g]];
    return g;
  }
  void join(int64_t into, int64_t g) { next_[g] = into; }

 private:
  std::vector<int64_t> next_;  // towards the group's own number
};

using Group = std::pair<int64_t, int64_t>;  // (U, number)
using GroupSet = std::set<Group>;

/// Packs the groups that meet at one node. Two groups from the same child never fit together, because they
/// did not fit at the child, where they would have shared more. So bins need not track the origin of groups.
class Bins {
 public:
  Bins(GroupSet& bins, Groups& groups, int64_t budget, int64_t path)
      : bins_(bins), groups_(groups), limit_(budget + path), path_(path) {}

  /// Adds a group to the fullest bin that it fits in.
  void add(const Group& g) {
    auto fit = bins_.upper_bound({limit_ - g.first, std::numeric_limits<int64_t>::max()});
    if (fit == bins_.begin()) {
      bins_.insert(g);
      return;
    }
    --fit;
    auto bin = bins_.extract(fit);
    groups_.join(bin.value().second, g.second);
    bin.value().first += g.first - path_;
    bins_.insert(std::move(bin));
  }

 private:
  GroupSet& bins_;
  Groups& groups_;
  int64_t limit_, path_;
};

/// Up to this many groups are packed from scratch. Where there are more, the largest child's groups are kept
/// as bins, so that a group is handled O(log n) times over all its ancestors.
constexpr size_t kRepackAtMost = 256;

void pack_node(std::vector<GroupSet>& children, int64_t budget, int64_t path, Groups& groups, GroupSet& out) {
  size_t total = 0;
  for (const GroupSet& c : children) total += c.size();
  auto largest = std::max_element(children.begin(), children.end(),
                                  [](const GroupSet& a, const GroupSet& b) { return a.size() < b.size(); });
  out.clear();
  if (total > kRepackAtMost) out.swap(*largest);
  std::vector<Group> items;
  for (const GroupSet& c : children) items.insert(items.end(), c.begin(), c.end());
  std::sort(items.begin(), items.end(), [](const Group& a, const Group& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  Bins bins(out, groups, budget, path);
  for (const Group& g : items) bins.add(g);
}

}  // namespace

LeafParts fill_depth_first(const TokenTree& tree, int64_t budget) {
  const LeafPaths leaves = leaf_paths(tree);
  LeafParts parts;
  int64_t tokens = 0;
  for (int64_t k = 0; k < leaves.num_leaves(); ++k) {
    const int64_t added = leaves.path[k] - leaves.shared[k];
    if (k > 0 && tokens + added > budget) {
      parts.end_row();
      tokens = 0;
    }
    tokens += tokens == 0 ? leaves.path[k] : added;
    parts.values.push_back(k);
  }
  if (!parts.values.empty()) parts.end_row();
  return parts;
}

LeafParts merge_bottom_up(const TokenTree& tree, int64_t budget) {
  const std::vector<int64_t> length = path_lengths(tree);
  const int64_t num_nodes = tree.num_nodes();
  budget = std::min(budget, tree.num_tokens());
  std::vector<int64_t> leaf_index(num_nodes, -1);
  int64_t num_leaves = 0;
  for (int64_t n = 0; n < num_nodes; ++n) {
    if (tree.is_leaf(n)) leaf_index[n] = num_leaves++;
  }
  Groups groups(num_leaves);
  // Nodes are visited in reverse preorder, so a node's children are on top of the stack when it is visited.
  std::vector<GroupSet> stack, children;
  std::vector<int64_t> num_children(num_nodes, 0);
  for (int64_t n = num_nodes - 1; n >= 0; --n) {
    if (n > 0) ++num_children[tree.parent[n]];
    if (tree.is_leaf(n)) {
      stack.push_back({{length[n], leaf_index[n]}});
      continue;
    }
    if (num_children[n] == 1) continue;
    const auto first = stack.end() - num_children[n];
    children.assign(std::make_move_iterator(first), std::make_move_iterator(stack.end()));
    stack.resize(stack.size() - num_children[n]);
    pack_node(children, budget, length[n], groups, stack.emplace_back());
  }
  std::vector<int64_t> label(num_leaves);
  for (int64_t k = 0; k < num_leaves; ++k) label[k] = groups.find(k);
  return parts_from_labels(label);
}

int64_t search_work(int64_t num_leaves) {
  return 50'000 + 400 * num_leaves;
}

LeafParts split_tree(const TokenTree& tree, int64_t budget, int64_t work) {
  const LeafPaths leaves = leaf_paths(tree);
  if (leaves.num_leaves() == 0) return {};
  ESPALIER_ASSERT(*std::max_element(leaves.path.begin(), leaves.path.end()) <= budget);
  if (tree.num_tokens() <= budget) return parts_from_labels(std::vector<int64_t>(leaves.num_leaves(), 0));
  LeafParts best = merge_bottom_up(tree, budget);
  int64_t best_tokens = total_tokens(leaves, best);
  for (LeafParts other : {fill_depth_first(tree, budget), pack_single_path(tree, budget).parts}) {
    const int64_t tokens = total_tokens(leaves, other);
    if (tokens >= best_tokens) continue;
    best = std::move(other);
    best_tokens = tokens;
  }
  return improve_parts(leaves, budget, std::move(best), work);
}

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
