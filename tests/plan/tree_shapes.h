// SPDX-License-Identifier: Apache-2.0
// Random token trees of the shapes that matter for packing.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "espalier/base/rng.h"
#include "espalier/plan/leaf_parts.h"

namespace espalier::testing {

enum class TreeShape {
  kBinary,       // halves and halves again
  kWide,         // up to sixteen children
  kChain,        // a long spine that leaves and small bushes hang on, as agent turns do
  kUnbalanced,   // branches anywhere
  kLongPrompt,   // one long root, short bushes below
  kShortPrompt,  // nearly nothing shared at the root, long bushes below
};
inline constexpr TreeShape kTreeShapes[] = {TreeShape::kBinary,     TreeShape::kWide,
                                            TreeShape::kChain,      TreeShape::kUnbalanced,
                                            TreeShape::kLongPrompt, TreeShape::kShortPrompt};
const char* to_string(TreeShape shape);

/// `num_leaves` leaves; nodes of 1 to 40 tokens where the shape does not say otherwise; some inner nodes have
/// one child, as where a trajectory ends inside.
TokenTree random_tree(TreeShape shape, int64_t num_leaves, Rng& rng);

/// A budget from the longest leaf path to half the tree (or the longest path where that is more).
int64_t random_budget(const TokenTree& tree, Rng& rng);

/// U by its definition: the distinct nodes on the root paths of these leaves (indices in preorder).
int64_t naive_part_tokens(const TokenTree& tree, const std::vector<int64_t>& leaves);

/// The first fault of the parts (a leaf twice or missing, a part over the budget), or "".
std::string parts_fault(const TokenTree& tree, int64_t budget, const LeafParts& parts);

/// Calls `visit` with every way to divide the leaves into parts (Bell numbers: few leaves only).
void for_each_packing(int64_t num_leaves, const std::function<void(const LeafParts&)>& visit);

}  // namespace espalier::testing
