// Improves a tree packing by solving small neighbourhoods exactly.
//
// A neighbourhood is two or three parts. Their leaves span a tree of their own, in which every largest
// subtree that lies in one part becomes one leaf (an item); the heaviest items are opened again while there
// are few enough of them. multi_path.h packs that tree, asked only for what beats the parts' present tokens,
// and its answer replaces the parts. So one step moves, swaps and merges leaves and whole subtrees at once.
// Parts are neighbours when consecutive leaves lie in them (deepest shared node first), or when both have
// much room left.
#pragma once

#include "espalier/plan/leaf_parts.h"

namespace espalier {

/// Parts of at most as many tokens in total, each within the budget as before. Deterministic; stops when no
/// neighbourhood improves or after `work` steps (about ten million a second).
LeafParts improve_parts(const LeafPaths& leaves, int64_t budget, LeafParts parts, int64_t work);

}  // namespace espalier
