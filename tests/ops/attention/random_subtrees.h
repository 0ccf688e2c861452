// SPDX-License-Identifier: Apache-2.0
// Random forests in preorder, as subtree_end alone. Free of LibTorch and of Espalier.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace espalier::testing {

/// Shapes of random forests; kMixed draws everything: one-child nodes (a trajectory that ends inside the
/// tree), several trees, nodes of one token.
enum class ForestShape { kChain, kStar, kDeep, kWide, kSingleTokens, kSeveralTrees, kMixed };
inline constexpr int kNumForestShapes = 7;

namespace detail {

struct GrowingForest {
  std::vector<std::vector<int>>
      children;  // by node; the roots are the children of node 0, which has no tokens
  std::vector<int> num_tokens;

  void lay_out(int node, std::vector<int32_t>& subtree_end) const {
    const size_t begin = subtree_end.size();
    subtree_end.resize(begin + static_cast<size_t>(num_tokens[node]));
    for (int child : children[node]) lay_out(child, subtree_end);
    for (int i = 0; i < num_tokens[node]; ++i)
      subtree_end[begin + i] = static_cast<int32_t>(subtree_end.size());
  }
};

}  // namespace detail

/// subtree_end of a random forest of up to max_nodes nodes of 1 to max_node_tokens tokens.
inline std::vector<int32_t> random_subtree_end(std::mt19937_64& random, ForestShape shape, int max_nodes,
                                               int max_node_tokens) {
  const auto between = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  const int num_nodes = shape == ForestShape::kChain ? 1 : between(2, max_nodes);
  detail::GrowingForest forest{{{}}, {0}};
  for (int node = 1; node <= num_nodes; ++node) {
    int parent = 0;
    if (node > 1) {
      switch (shape) {
        case ForestShape::kChain:
          break;
        case ForestShape::kStar:
          parent = 1;
          break;
        case ForestShape::kDeep:
          parent = between(std::max(1, node - 2), node - 1);
          break;
        case ForestShape::kWide:
          parent = between(1, std::min(node - 1, 3));
          break;
        case ForestShape::kSingleTokens:
          parent = between(1, node - 1);
          break;
        case ForestShape::kSeveralTrees:
          parent = between(0, 2) == 0 ? 0 : between(1, node - 1);
          break;
        case ForestShape::kMixed:
          parent = between(0, node - 1);
          break;
      }
    }
    forest.children.emplace_back();
    forest.children[static_cast<size_t>(parent)].push_back(node);
    forest.num_tokens.push_back(shape == ForestShape::kSingleTokens ? 1 : between(1, max_node_tokens));
  }
  std::vector<int32_t> subtree_end;
  forest.lay_out(0, subtree_end);
  return subtree_end;
}

/// Whether token j may attend to token i.
inline bool visible(const std::vector<int32_t>& subtree_end, int64_t j, int64_t i) {
  return i <= j && j < subtree_end[static_cast<size_t>(i)];
}

}  // namespace espalier::testing
