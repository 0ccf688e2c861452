// SPDX-License-Identifier: Apache-2.0
#include "espalier/tree/forest.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <unordered_map>

#include "espalier/base/check.h"

namespace espalier {
namespace {

void check_sequences(const TokenSequences& sequences) {
  const auto& offsets = sequences.offsets;
  ESPALIER_CHECK(!offsets.empty() && offsets.front() == 0,
                 "sequences: expected offsets that begin with 0, received {}",
                 offsets.empty() ? "none" : fmt::format("{} first", offsets.front()));
  const auto num_tokens = static_cast<int64_t>(sequences.tokens.size());
  ESPALIER_CHECK(offsets.back() == num_tokens, "sequences: expected {} tokens (the last offset), received {}",
                 offsets.back(), num_tokens);
  ESPALIER_CHECK(sequences.merge_keys.empty() || sequences.merge_keys.size() == sequences.tokens.size(),
                 "sequences: expected {} merge keys (one per token), received {}", num_tokens,
                 sequences.merge_keys.size());
  ESPALIER_CHECK(sequences.tree_keys.empty() ||
                     static_cast<int64_t>(sequences.tree_keys.size()) == sequences.num_sequences(),
                 "sequences: expected {} tree keys (one per sequence), received {}",
                 sequences.num_sequences(), sequences.tree_keys.size());
}

/// The number of equal leading elements, at most n.
template <typename T>
int64_t common_prefix(const T* a, const T* b, int64_t n) {
  constexpr int64_t kBlock = 64;
  int64_t k = 0;
  while (n - k >= kBlock && std::memcmp(a + k, b + k, kBlock * sizeof(T)) == 0) k += kBlock;
  while (k < n && a[k] == b[k]) ++k;
  return k;
}

uint64_t mix(uint64_t x) {  // the finaliser of SplitMix64 (Steele, Lea, Flood, 2014)
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

/// A compressed trie that grows by one sequence at a time. Nodes are numbered in order of creation and hold
/// views into the input; a node's children are found by one hash table over (parent, first token, merge key).
/// The roots of each tree key have a virtual parent, numbered -1, -2, ...
class Trie {
 public:
  explicit Trie(const TokenSequences& sequences) : sequences_(sequences), slots_(kFirstSlots) {}

  /// Adds the sequence of `row` as the next trajectory.
  void add(int64_t row) {
    int64_t at = sequences_.offsets[row];
    const int64_t end = sequences_.offsets[row + 1];
    const auto trajectory = static_cast<int64_t>(end_node_.size());
    int64_t parent = virtual_parent(row);
    int64_t leaf = -1;
    while (at < end) {
      Slot& slot = find(parent, at);
      if (slot.node < 0) {
        leaf = append({at, end - at, parent, trajectory});
        occupy(slot, parent, leaf);
        parent = leaf;
        break;
      }
      const int64_t shared = shared_tokens(nodes_[slot.node].begin, at, nodes_[slot.node].size, end - at);
      parent = shared < nodes_[slot.node].size ? split(slot, shared) : slot.node;
      at += shared;
    }
    end_node_.push_back(parent);
    leaf_of_.push_back(leaf);
    count_read(sequences_.offsets[row + 1] - sequences_.offsets[row]);
  }

  /// Converts the trie to a forest. The trie is empty afterwards.
  Forest finish(ChildOrder child_order) {
    std::vector<Slot>().swap(slots_);
    Forest forest;
    Children children = linked();
    if (child_order == ChildOrder::kMostLeavesFirst) put_most_leaves_first(children);
    const std::vector<int64_t> order = preorder(children);
    copy_nodes(order, forest);
    copy_tokens(order, forest);
    if (sequences_.release) sequences_.release();
    count(forest);
    return forest;
  }

 private:
  struct Node {
    int64_t begin;   // into TokenSequences::tokens
    int64_t size;    // tokens
    int64_t parent;  // node, negative at a root
    int64_t first;   // the trajectory that reached the node first
  };
  struct Slot {
    uint64_t hash = 0;
    int64_t node = -1;
  };
  static constexpr size_t kFirstSlots = 1024;
  static constexpr int64_t kReleaseEvery = int64_t{1} << 24;  // tokens

  int64_t virtual_parent(int64_t row) {
    if (sequences_.tree_keys.empty()) return -1;
    const auto next = -1 - static_cast<int64_t>(virtual_parents_.size());
    return virtual_parents_.try_emplace(sequences_.tree_keys[row], next).first->second;
  }

  uint64_t merge_key(int64_t at) const {
    return sequences_.merge_keys.empty() ? 0 : sequences_.merge_keys[at];
  }

  uint64_t hash(int64_t parent, int64_t at) const {
    const uint64_t token = static_cast<uint32_t>(sequences_.tokens[at]);
    return mix(mix(static_cast<uint64_t>(parent) + 0x9e3779b97f4a7c15ULL * token) + merge_key(at));
  }

  /// The slot of the child of `parent` that begins like the input at `at`, or a free slot when there is none.
  Slot& find(int64_t parent, int64_t at) {
    const uint64_t wanted = hash(parent, at);
    const size_t mask = slots_.size() - 1;
    for (size_t k = wanted & mask;; k = (k + 1) & mask) {
      Slot& slot = slots_[k];
      if (slot.node < 0) return slot;
      if (slot.hash != wanted) continue;
      const Node& node = nodes_[slot.node];
      if (node.parent == parent && sequences_.tokens[node.begin] == sequences_.tokens[at] &&
          merge_key(node.begin) == merge_key(at)) {
        return slot;
      }
    }
  }

  /// Inserts a new node into the table. `slot` is the result of find() for it, and is invalid afterwards.
  void occupy(Slot& slot, int64_t parent, int64_t node) {
    slot = {hash(parent, nodes_[node].begin), node};
    if (nodes_.size() * 2 > slots_.size()) grow();
  }

  void grow() {
    std::vector<Slot> old(slots_.size() * 2);
    old.swap(slots_);
    const size_t mask = slots_.size() - 1;
    for (const Slot& slot : old) {
      if (slot.node < 0) continue;
      size_t k = slot.hash & mask;
      while (slots_[k].node >= 0) k = (k + 1) & mask;
      slots_[k] = slot;
    }
  }

  int64_t append(const Node& node) {
    nodes_.push_back(node);
    return static_cast<int64_t>(nodes_.size()) - 1;
  }

  int64_t shared_tokens(int64_t a, int64_t b, int64_t size_a, int64_t size_b) const {
    const int64_t n =
        common_prefix(sequences_.tokens.data() + a, sequences_.tokens.data() + b, std::min(size_a, size_b));
    if (sequences_.merge_keys.empty()) return n;
    return common_prefix(sequences_.merge_keys.data() + a, sequences_.merge_keys.data() + b, n);
  }

  /// Cuts the node in `slot` after `size` tokens and returns the upper part. The lower part keeps the node's
  /// number, so its children and the trajectories that end there stay valid.
  int64_t split(Slot& slot, int64_t size) {
    const int64_t lower = slot.node;
    const Node whole = nodes_[lower];
    const int64_t upper = append({whole.begin, size, whole.parent, whole.first});
    slot.node = upper;
    nodes_[lower] = {whole.begin + size, whole.size - size, upper, whole.first};
    occupy(find(upper, whole.begin + size), upper, lower);
    return upper;
  }

  /// Lists of siblings.
  struct Children {
    int64_t first_root = -1;
    std::vector<int64_t> first, next;  // [nodes] a node's first child, and its next sibling; -1: none
  };

  /// Siblings in the order of the trajectories that first reached them. The nodes that a trajectory reached
  /// first form a path that ends at its leaf, so it suffices to visit the trajectories in reverse and insert
  /// each node before its siblings.
  Children linked() const {
    Children children{.first = std::vector<int64_t>(nodes_.size(), -1),
                      .next = std::vector<int64_t>(nodes_.size(), -1)};
    for (auto r = static_cast<int64_t>(leaf_of_.size()) - 1; r >= 0; --r) {
      for (int64_t n = leaf_of_[r]; n >= 0 && nodes_[n].first == r; n = nodes_[n].parent) {
        int64_t& head = nodes_[n].parent < 0 ? children.first_root : children.first[nodes_[n].parent];
        children.next[n] = head;
        head = n;
      }
    }
    return children;
  }

  void put_most_leaves_first(Children& children) const {
    std::vector<int64_t> leaves(nodes_.size(), 0);
    std::vector<int64_t> children_first = preorder(children);
    std::reverse(children_first.begin(), children_first.end());
    for (const int64_t n : children_first) {
      if (children.first[n] < 0) leaves[n] = 1;
      if (nodes_[n].parent >= 0) leaves[nodes_[n].parent] += leaves[n];
    }
    for (int64_t& first : children.first) {
      if (first < 0) continue;
      int64_t before = -1;  // the sibling before the one with most leaves; -1: that is the first
      for (int64_t most = leaves[first], n = first; children.next[n] >= 0; n = children.next[n]) {
        if (leaves[children.next[n]] > most) most = leaves[children.next[n]], before = n;
      }
      if (before < 0) continue;
      const int64_t heavy = children.next[before];
      children.next[before] = children.next[heavy];
      children.next[heavy] = first;
      first = heavy;
    }
  }

  std::vector<int64_t> preorder(const Children& children) const {
    std::vector<int64_t> order, stack;
    order.reserve(nodes_.size());
    if (children.first_root >= 0) stack.push_back(children.first_root);
    while (!stack.empty()) {
      const int64_t n = stack.back();
      stack.pop_back();
      order.push_back(n);
      if (children.next[n] >= 0) stack.push_back(children.next[n]);
      if (children.first[n] >= 0) stack.push_back(children.first[n]);
    }
    ESPALIER_ASSERT(order.size() == nodes_.size());
    return order;
  }

  void count_read(int64_t tokens) {
    unreleased_ += tokens;
    if (unreleased_ < kReleaseEvery) return;
    unreleased_ = 0;
    if (sequences_.release) sequences_.release();
  }

  void copy_nodes(const std::vector<int64_t>& order, Forest& forest) const {
    std::vector<int64_t> number(nodes_.size());
    forest.parent.reserve(order.size());
    forest.position.reserve(order.size());
    forest.node_begin.reserve(order.size() + 1);
    forest.node_begin.push_back(0);
    for (size_t k = 0; k < order.size(); ++k) {
      const Node& node = nodes_[order[k]];
      number[order[k]] = static_cast<int64_t>(k);
      const int64_t parent = node.parent < 0 ? -1 : number[node.parent];
      forest.parent.push_back(parent);
      forest.position.push_back(parent < 0 ? 0 : forest.position[parent] + forest.node_size(parent));
      forest.node_begin.push_back(forest.node_begin.back() + node.size);
    }
    forest.end_node.reserve(end_node_.size());
    for (const int64_t n : end_node_) forest.end_node.push_back(number[n]);
  }

  void copy_tokens(const std::vector<int64_t>& order, Forest& forest) {
    forest.tokens.reserve(forest.node_begin.back());
    for (const int64_t n : order) {
      const auto begin = sequences_.tokens.begin() + nodes_[n].begin;
      forest.tokens.insert(forest.tokens.end(), begin, begin + nodes_[n].size);
      count_read(nodes_[n].size);
    }
  }

  static void count(Forest& forest) {
    const int64_t num_nodes = forest.num_nodes();
    forest.multiplicity.assign(num_nodes, 0);
    forest.subtree_last.resize(num_nodes);
    std::iota(forest.subtree_last.begin(), forest.subtree_last.end(), 1);
    for (const int64_t n : forest.end_node) ++forest.multiplicity[n];
    for (int64_t n = num_nodes - 1; n >= 0; --n) {
      const int64_t parent = forest.parent[n];
      if (parent < 0) continue;
      forest.multiplicity[parent] += forest.multiplicity[n];
      forest.subtree_last[parent] = std::max(forest.subtree_last[parent], forest.subtree_last[n]);
    }
  }

  const TokenSequences& sequences_;
  std::vector<Node> nodes_;
  std::vector<Slot> slots_;  // open addressing, at most half full
  std::unordered_map<int64_t, int64_t> virtual_parents_;
  std::vector<int64_t> end_node_;  // [trajectories]
  std::vector<int64_t> leaf_of_;   // [trajectories] the leaf that the trajectory created, -1: none
  int64_t unreleased_ = 0;         // tokens read since the last release
};

/// Visible pairs of `size` consecutive tokens, the first of them at `position`.
int64_t run_pairs(int64_t position, int64_t size) {
  return size * position + size * (size + 1) / 2;
}

void count_branching(const Forest& forest, ForestStatistics& statistics) {
  std::vector<int64_t> children(forest.num_nodes(), 0), depth(forest.num_nodes(), 1);
  for (int64_t n = 0; n < forest.num_nodes(); ++n) {
    if (forest.parent[n] < 0) {
      ++statistics.num_trees;
    } else {
      ++children[forest.parent[n]];
      depth[n] = depth[forest.parent[n]] + 1;
    }
    statistics.max_depth_nodes = std::max(statistics.max_depth_nodes, depth[n]);
  }
  for (const int64_t count : children) {
    ++statistics.nodes_by_branching[count];
    statistics.max_branching = std::max(statistics.max_branching, count);
    statistics.num_leaves += count == 0;
  }
  const int64_t inner = statistics.num_nodes - statistics.num_leaves;
  if (inner > 0) {
    statistics.mean_branching =
        static_cast<double>(statistics.num_nodes - statistics.num_trees) / static_cast<double>(inner);
  }
}

void count_tokens(const Forest& forest, ForestStatistics& statistics) {
  for (int64_t n = 0; n < forest.num_nodes(); ++n) {
    const int64_t position = forest.position[n], size = forest.node_size(n);
    statistics.flat_tokens += forest.multiplicity[n] * size;
    statistics.flat_pairs += forest.multiplicity[n] * run_pairs(position, size);
    statistics.tree_pairs += run_pairs(position, size);
    statistics.tokens_by_multiplicity[forest.multiplicity[n]] += size;
    statistics.max_depth_tokens = std::max(statistics.max_depth_tokens, position + size);
    const bool leaf = forest.subtree_last[n] == n + 1;
    if (leaf) {
      statistics.append_only_tokens += position + size;
      statistics.append_only_pairs += run_pairs(0, position + size);
    }
  }
}

}  // namespace

int64_t Forest::flat_tokens() const {
  int64_t total = 0;
  for (int64_t n = 0; n < num_nodes(); ++n) total += multiplicity[n] * node_size(n);
  return total;
}

Forest build_forest(const TokenSequences& sequences, std::span<const int64_t> rows, ChildOrder order) {
  check_sequences(sequences);
  const int64_t num_rows = rows.empty() ? sequences.num_sequences() : static_cast<int64_t>(rows.size());
  Trie trie(sequences);
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t row = rows.empty() ? r : rows[r];
    ESPALIER_CHECK(row >= 0 && row < sequences.num_sequences(), "row {}: expected a row in [0, {})", row,
                   sequences.num_sequences());
    const int64_t begin = sequences.offsets[row], end = sequences.offsets[row + 1];
    ESPALIER_CHECK(begin != end, "row {}: expected at least one token, received an empty sequence", row);
    ESPALIER_CHECK(0 <= begin && begin < end && end <= sequences.offsets.back(),
                   "row {}: expected ascending offsets in [0, {}], received [{}, {})", row,
                   sequences.offsets.back(), begin, end);
    trie.add(row);
  }
  return trie.finish(order);
}

std::vector<int64_t> root_path(const Forest& forest, int64_t n) {
  std::vector<int64_t> path;
  for (; n >= 0; n = forest.parent[n]) path.push_back(n);
  std::reverse(path.begin(), path.end());
  return path;
}

std::vector<int64_t> first_leaves(const Forest& forest) {
  // In preorder a node's first child follows it, so both have the same first leaf.
  std::vector<int64_t> first(forest.num_nodes());
  for (int64_t n = forest.num_nodes() - 1; n >= 0; --n) {
    first[n] = forest.subtree_last[n] == n + 1 ? n : first[n + 1];
  }
  return first;
}

ForestStatistics forest_statistics(const Forest& forest) {
  ForestStatistics statistics;
  statistics.num_trajectories = forest.num_trajectories();
  statistics.num_nodes = forest.num_nodes();
  statistics.tree_tokens = forest.tree_tokens();
  count_branching(forest, statistics);
  count_tokens(forest, statistics);
  if (statistics.tree_tokens > 0) {
    const auto flat = static_cast<double>(statistics.flat_tokens);
    const auto tree = static_cast<double>(statistics.tree_tokens);
    statistics.cached_token_ratio = flat / tree;
    statistics.por = 1 - tree / flat;
  }
  return statistics;
}

}  // namespace espalier
