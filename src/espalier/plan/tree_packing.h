// Tree packing: parts of trees that each fit the budget, their prefixes repeated.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/plan/plan.h"

namespace espalier {

/// Whole trees, several to a micro-batch (best-fit decreasing); a tree over the budget is split into parts
/// that repeat as few prefix tokens as the heuristics find (tree_heuristic.h; the problem is in
/// leaf_parts.h). A trajectory that ends at an inner node goes with the first leaf below it. Runs are nodes,
/// and no micro-batch holds a forest token twice: parts of one tree that meet in a micro-batch are joined.
/// Micro-batches stand in the order in which best-fit decreasing opens them: that of their largest part,
/// decreasing, ties in forest order, parts of a tree by their first leaf. Deterministic.
/// `budget` is at least longest_trajectory(forest).
std::vector<MicroBatch> pack_trees(const Forest& forest, int64_t budget);

}  // namespace espalier
