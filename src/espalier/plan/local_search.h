// SPDX-License-Identifier: Apache-2.0
// Improves a tree packing by solving small neighbourhoods exactly.
//
// A neighbourhood is two or three parts. Their leaves span a small tree, in which every maximal subtree that
// lies in a single part becomes one leaf (an item). The heaviest items are expanded again as long as there
// are few enough. multi_path.h searches for packings of this tree with fewer tokens than the parts have; a
// packing that it finds replaces the parts. One step thus moves, swaps and merges leaves and whole subtrees.
// Parts are neighbours if they hold consecutive leaves (those with the deepest shared node come first), or if
// all of them have many free tokens.
#pragma once

#include "espalier/plan/leaf_parts.h"

namespace espalier {

/// Returns parts with at most as many tokens in total, each within the budget. Deterministic. Stops when no
/// neighbourhood improves or after `work` steps (about ten million a second).
LeafParts improve_parts(const LeafPaths& leaves, int64_t budget, LeafParts parts, int64_t work);

}  // namespace espalier
