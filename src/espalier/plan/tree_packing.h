// Tree packing: parts of trees that each fit the budget, their prefixes repeated.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/plan/plan.h"

namespace espalier {

/// Whole trees, several to a micro-batch (best-fit decreasing); a tree over the budget is split by branches,
/// depth first, and the prefix of each part repeated. Runs are nodes, and no micro-batch holds a forest token
/// twice: parts of one tree that meet in a micro-batch are joined. Micro-batches stand in the order in which
/// best-fit decreasing opens them: that of their largest part, decreasing, ties in forest order.
/// `budget` is at least longest_trajectory(forest).
std::vector<MicroBatch> pack_trees(const Forest& forest, int64_t budget);

}  // namespace espalier
