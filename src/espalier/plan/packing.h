// SPDX-License-Identifier: Apache-2.0
// Packs trees and sequences into micro-batches, and items into bins.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/plan/plan.h"

namespace espalier {

/// Best-fit decreasing: items are packed from the largest to the smallest, each into the fullest bin that
/// that it still fits in. Ties go to the earlier item and the older bin. Returns the items of each bin in
/// ascending order, and the bins in the order in which they were opened. Every size must be at most
/// `capacity`. O(n log n).
std::vector<std::vector<int64_t>> best_fit_decreasing(const std::vector<int64_t>& sizes, int64_t capacity);

/// The largest differencing method (Karmarkar and Karp, "The differencing method of set partitioning", 1982),
/// for `num_sets` >= 1 sets. It starts with one division per number and repeatedly joins the two divisions
/// whose largest and smallest sums differ most, the largest sets of one with the smallest of the other.
/// Returns the indices of each set, ascending. Ties go to the earlier number. Numbers must not be negative.
/// O(n (num_sets + log n)).
std::vector<std::vector<int64_t>> largest_differencing(std::span<const double> numbers, int64_t num_sets);

/// Packs whole trees, several to a micro-batch, by best-fit decreasing. A tree over the budget is split into
/// parts that repeat as few prefix tokens as the heuristics find (tree_heuristic.h; the problem is in
/// leaf_parts.h). A trajectory that ends at an inner node goes with the first leaf below it. Runs are nodes.
/// No micro-batch has a forest token twice, because parts of one tree in the same micro-batch are joined.
/// Micro-batches are in the order in which best-fit decreasing opens them: by their largest part, descending.
/// Ties are in forest order, and parts of a tree are ordered by their first leaf. Deterministic. `budget`
/// must be at least longest_trajectory(forest).
std::vector<MicroBatch> pack_trees(const Forest& forest, int64_t budget);

/// Packs the root path of every leaf as a separate chain: append-only merging, where trajectories that others
/// extend are encoded with the first of them. Otherwise as pack_sequences; runs are nodes.
std::vector<MicroBatch> pack_leaf_paths(const Forest& forest, int64_t budget);

/// Packs every trajectory as a separate chain, by best-fit decreasing. Nothing is shared. Runs are the
/// maximal parts of the path whose forest tokens are contiguous. Micro-batches are sorted by their largest
/// trajectory, descending; ties go by trajectory. `budget` must be at least longest_trajectory(forest).
std::vector<MicroBatch> pack_sequences(const Forest& forest, int64_t budget);

}  // namespace espalier
