// SPDX-License-Identifier: Apache-2.0
// Tree packing: divides trees into parts that each fit the budget and repeat prefixes.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/plan/plan.h"

namespace espalier {

/// Packs whole trees, several to a micro-batch, by best-fit decreasing. A tree over the budget is split into
/// parts that repeat as few prefix tokens as the heuristics find (tree_heuristic.h; the problem is in
/// leaf_parts.h). A trajectory that ends at an inner node goes with the first leaf below it. Runs are nodes.
/// No micro-batch has a forest token twice, because parts of one tree in the same micro-batch are joined.
/// Micro-batches are in the order in which best-fit decreasing opens them: by their largest part, descending.
/// Ties are in forest order, and parts of a tree are ordered by their first leaf. Deterministic. `budget`
/// must be at least longest_trajectory(forest).
std::vector<MicroBatch> pack_trees(const Forest& forest, int64_t budget);

}  // namespace espalier
