// SPDX-License-Identifier: Apache-2.0
// Partition: cuts a forest that is larger than the token budget into connected pieces. Every token is encoded
// once. The forward pass of a piece reads the context of its ancestors, and its backward pass comes after
// those of its descendants.
#pragma once

#include <compare>
#include <cstdint>
#include <span>
#include <vector>

#include "espalier/plan/plan.h"

namespace espalier {

/// Which pieces may share a micro-batch. They may only if all of them continue the same parent micro-batch
/// (at any of its tokens), or if all of them begin trees.
enum class Merge {
  kNone,    // every piece runs alone
  kLeaves,  // pieces without descendants may share; a piece with descendants runs alone
  kAll      // all pieces may share
};

/// Makes the micro-batches of a partition from its cuts. Cuts are ascending forest tokens j, each of which
/// begins a piece because the edge (prev[j], j) is cut. The first tokens of trees begin pieces without a cut.
/// Pieces are merged by best-fit decreasing. Runs are nodes, or parts of nodes where there are cuts, in
/// forest order. A trajectory is placed in every micro-batch that its path touches. Siblings are in forest
/// order. Throws InternalError if cuts are out of order or a piece is larger than the budget. Near linear in
/// nodes, cuts and placements.
std::vector<MicroBatch> partition_at(const Forest& forest, std::span<const int64_t> cuts,
                                     int64_t token_budget, Merge merge);

/// Chooses cuts after which no piece exceeds the budget (>= 1, else InputError). It works bottom-up and
/// prefers the fewest micro-batches, then the smallest piece that continues upwards. This is the algorithm of
/// Kundu and Misra, "A linear tree partitioning algorithm", SIAM J. Comput. 6 (1977), where every token is a
/// vertex of weight one. Siblings that are cut off are packed together into micro-batches (as `merge`
/// allows). With Merge::kNone and cuts inside nodes the number of pieces is the smallest possible. Without
/// `cut_inside_nodes`, only nodes longer than the budget are cut inside. O(n log n) for n nodes and cuts.
std::vector<int64_t> choose_cuts(const Forest& forest, int64_t token_budget, bool cut_inside_nodes,
                                 Merge merge);

/// The cost of a partition. Costs are compared by the fields in this order.
struct PartitionCost {
  int64_t micro_batches = 0;
  int64_t context_tokens = 0;     // read, over all micro-batches
  int64_t peak_chain_tokens = 0;  // most tokens of a micro-batch and its ancestors, whose activations coexist

  auto operator<=>(const PartitionCost&) const = default;
};

PartitionCost partition_cost(std::span<const MicroBatch> micro_batches);

/// The cheaper of the partitions with and without cuts inside nodes. Deterministic; an empty forest has no
/// micro-batches. Throws InputError for a budget below 1.
std::vector<MicroBatch> partition(const Forest& forest, int64_t token_budget, Merge merge);

}  // namespace espalier
