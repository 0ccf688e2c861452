// SPDX-License-Identifier: Apache-2.0
// The prefix trees of a set of trajectories, and how much they share.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <vector>

namespace espalier {

/// Token sequences among which to share prefixes, as views. Sequence r is tokens[offsets[r], offsets[r + 1]);
/// empty sequences are refused.
struct TokenSequences {
  std::span<const int64_t> offsets;  // [num_sequences + 1]
  std::span<const int32_t> tokens;   // [offsets.back()]
  /// [offsets.back()] or empty. Tokens are shared only where their merge keys are equal too.
  std::span<const uint64_t> merge_keys = {};
  /// [num_sequences] or empty. Sequences with different keys share nothing.
  std::span<const int64_t> tree_keys = {};
  /// If set, build_forest calls this from time to time while it reads tokens. The caller may then release
  /// memory that caches tokens read so far (pages of a mapped file), as long as the views stay valid.
  std::function<void()> release = {};

  int64_t num_sequences() const { return static_cast<int64_t>(offsets.size()) - 1; }
};

/// A forest in preorder: the tokens of a node are contiguous, and a node's descendants follow it directly.
/// Chains are collapsed: an inner node either branches or ends a trajectory. Trees and children are in the
/// order in which the trajectories first reach them (or see ChildOrder), so equal input gives equal output.
/// "Trajectory" r is the r-th of the rows that the forest was built from.
struct Forest {
  std::vector<int32_t> tokens;        // [tree_tokens]
  std::vector<int64_t> node_begin;    // [num_nodes + 1] node n is tokens [node_begin[n], node_begin[n + 1])
  std::vector<int64_t> parent;        // [num_nodes] node, -1 at a root; parent[n] < n
  std::vector<int64_t> subtree_last;  // [num_nodes] one past the last node of n's subtree
  std::vector<int64_t> position;      // [num_nodes] position of the node's first token on its root path
  std::vector<int64_t> multiplicity;  // [num_nodes] trajectories that pass through (or end in) the node
  std::vector<int64_t> end_node;      // [num_trajectories] node at whose end the trajectory ends

  int64_t num_nodes() const { return static_cast<int64_t>(parent.size()); }
  int64_t num_trajectories() const { return static_cast<int64_t>(end_node.size()); }
  int64_t tree_tokens() const { return static_cast<int64_t>(tokens.size()); }
  int64_t node_size(int64_t n) const { return node_begin[n + 1] - node_begin[n]; }
  int64_t trajectory_size(int64_t r) const { return position[end_node[r]] + node_size(end_node[r]); }
  int64_t flat_tokens() const;
};

/// Where the children of a node stand: in the order in which trajectories first reach them, or the one with
/// most leaves first and the others in that order. Then a path has at most log2(leaves) children that are not
/// first (every such step at least halves the leaves), so few intervals of preorder hold it.
enum class ChildOrder { kFirstReached, kMostLeavesFirst };

/// Builds the forest of the given rows of `sequences` (all rows when `rows` is empty), in time linear in the
/// flat tokens (expected time, because children are found by hashing). A row that is listed twice becomes two
/// trajectories. Throws InputError naming the row for an empty sequence or a row that does not exist, and for
/// arrays whose lengths do not match.
Forest build_forest(const TokenSequences& sequences, std::span<const int64_t> rows = {},
                    ChildOrder order = ChildOrder::kFirstReached);

/// Nodes from the root to node n, both included.
std::vector<int64_t> root_path(const Forest& forest, int64_t n);

/// For each node the first leaf below it; a leaf itself.
std::vector<int64_t> first_leaves(const Forest& forest);

/// Counts of a forest. Append-only merging, which a trainer without trees can do, drops trajectories that
/// another one extends or equals and encodes the others separately. It leaves one trajectory per leaf:
/// trajectories that end at inner nodes are dropped, and duplicates count once. append_only_tokens is the sum
/// of the leaves' path lengths L, and append_only_pairs the sum of L (L + 1) / 2. Equal tokens with different
/// merge keys or tree keys do not extend each other.
struct ForestStatistics {
  int64_t num_trajectories = 0;
  int64_t num_trees = 0;
  int64_t num_nodes = 0;
  int64_t num_leaves = 0;
  int64_t flat_tokens = 0;         // tokens with repetition
  int64_t tree_tokens = 0;         // tokens without repetition
  int64_t append_only_tokens = 0;  // tokens with repetition after append-only merging
  int64_t flat_pairs = 0;          // visible (query, key) pairs of the separate trajectories
  int64_t tree_pairs = 0;          // visible (query, key) pairs in the forest
  int64_t append_only_pairs = 0;   // visible pairs of the trajectories left after append-only merging
  double cached_token_ratio = 1;   // flat / tree
  double por = 0;                  // 1 - tree / flat
  int64_t max_depth_nodes = 0;     // most nodes on a root path
  int64_t max_depth_tokens = 0;    // tokens of the longest trajectory
  double mean_branching = 0;       // children per inner node; 0 if there is none
  int64_t max_branching = 0;
  std::map<int64_t, int64_t> tokens_by_multiplicity;  // multiplicity -> tree tokens
  std::map<int64_t, int64_t> nodes_by_branching;      // number of children -> nodes; leaves at 0
};

/// Linear in the nodes. An empty forest has ratio 1 and POR 0.
ForestStatistics forest_statistics(const Forest& forest);

}  // namespace espalier
