// SPDX-License-Identifier: Apache-2.0
#include "tests/plan/tree_shapes.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

namespace espalier::testing {
namespace {

/// How many leaves each child of a node with `count` leaves has.
std::vector<int64_t> split_leaves(TreeShape shape, int64_t count, bool is_root, Rng& rng) {
  switch (shape) {
    case TreeShape::kBinary:
      return {count / 2, count - count / 2};
    case TreeShape::kChain: {
      const int64_t bush = std::min(count - 1, rng.between(1, 3));
      return rng.below(2) == 0 ? std::vector<int64_t>{bush, count - bush}
                               : std::vector<int64_t>{count - bush, bush};
    }
    case TreeShape::kUnbalanced: {
      const int64_t left = rng.between(1, count - 1);
      return {left, count - left};
    }
    case TreeShape::kWide:
    case TreeShape::kLongPrompt:
    case TreeShape::kShortPrompt:
      break;
  }
  const int64_t children = std::min(count, is_root ? rng.between(2, 16) : rng.between(2, 6));
  std::vector<int64_t> parts(children, 1);
  for (int64_t left = count - children; left > 0;) {
    const int64_t more = rng.between(1, std::max<int64_t>(left / 2, 1));
    parts[rng.below(children)] += more;
    left -= more;
  }
  return parts;
}

int64_t node_tokens(TreeShape shape, bool is_root, Rng& rng) {
  if (shape == TreeShape::kLongPrompt) return is_root ? rng.between(100, 400) : rng.between(1, 20);
  if (shape == TreeShape::kShortPrompt) return is_root ? rng.between(1, 3) : rng.between(10, 100);
  return rng.between(1, 40);
}

}  // namespace

const char* to_string(TreeShape shape) {
  constexpr const char* kNames[] = {"binary", "wide", "chain", "unbalanced", "long prompt", "short prompt"};
  return kNames[static_cast<int>(shape)];
}

TokenTree random_tree(TreeShape shape, int64_t num_leaves, Rng& rng) {
  struct Pending {
    int64_t parent, count;
  };
  TokenTree tree;
  std::vector<Pending> pending{{-1, num_leaves}};
  while (!pending.empty()) {
    auto [parent, count] = pending.back();
    pending.pop_back();
    const bool is_root = parent < 0;
    for (int64_t more = rng.below(6) == 0 ? 2 : 1; more > 0; --more) {
      tree.parent.push_back(parent);
      tree.size.push_back(node_tokens(shape, is_root && parent < 0, rng));
      parent = tree.num_nodes() - 1;
    }
    if (count == 1) continue;
    for (const int64_t part : split_leaves(shape, count, is_root, rng)) pending.push_back({parent, part});
  }
  return tree;
}

int64_t random_budget(const TokenTree& tree, Rng& rng) {
  const LeafPaths leaves = leaf_paths(tree);
  const int64_t longest = *std::max_element(leaves.path.begin(), leaves.path.end());
  return rng.between(longest, std::max(longest, tree.num_tokens() / 2));
}

int64_t naive_part_tokens(const TokenTree& tree, const std::vector<int64_t>& leaves) {
  std::vector<int64_t> leaf_nodes;
  for (int64_t n = 0; n < tree.num_nodes(); ++n) {
    if (std::find(tree.parent.begin(), tree.parent.end(), n) == tree.parent.end()) leaf_nodes.push_back(n);
  }
  std::set<int64_t> nodes;
  for (const int64_t k : leaves) {
    for (int64_t n = leaf_nodes.at(k); n >= 0; n = tree.parent[n]) nodes.insert(n);
  }
  int64_t tokens = 0;
  for (const int64_t n : nodes) tokens += tree.size[n];
  return tokens;
}

std::string parts_fault(const TokenTree& tree, int64_t budget, const LeafParts& parts) {
  std::vector<int64_t> times(leaf_paths(tree).num_leaves(), 0);
  for (int64_t p = 0; p < parts.num_rows(); ++p) {
    if (parts.row_size(p) == 0) return fmt::format("part {} is empty", p);
    for (const int64_t k : parts.row(p)) ++times.at(k);
    const int64_t tokens = naive_part_tokens(tree, {parts.row(p).begin(), parts.row(p).end()});
    if (tokens > budget) return fmt::format("part {} has {} tokens, the budget is {}", p, tokens, budget);
  }
  for (const int64_t t : times) {
    if (t != 1) return fmt::format("a leaf is in {} parts", t);
  }
  return "";
}

void for_each_packing(int64_t num_leaves, const std::function<void(const LeafParts&)>& visit) {
  // Restricted growth strings: label[k] <= 1 + the largest label before k.
  std::vector<int64_t> label(num_leaves, 0);
  for (;;) {
    visit(parts_from_labels(label));
    int64_t k = num_leaves - 1;
    while (k > 0 && label[k] > *std::max_element(label.begin(), label.begin() + k)) --k;
    if (k <= 0) return;
    ++label[k];
    std::fill(label.begin() + k + 1, label.end(), 0);
  }
}

}  // namespace espalier::testing
