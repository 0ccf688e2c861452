// Partition: a forest larger than the token budget in connected pieces. Every token is encoded once; the
// forward pass of a piece reads the context of its ancestors, and its backward pass comes after theirs below.
#pragma once

#include <compare>
#include <cstdint>
#include <span>
#include <vector>

#include "espalier/plan/plan.h"

namespace espalier {

/// Which pieces may run together. Pieces meet in one micro-batch only when all of them hang at one parent
/// micro-batch (at any of its tokens), or all of them begin trees.
enum class Merge {
  kNone,    // every piece alone
  kLeaves,  // pieces without descendants; a piece that others hang at runs alone
  kAll
};

/// The micro-batches of a partition given by its cuts: ascending forest tokens j, each of which begins a
/// piece because the edge (prev[j], j) is cut. The first tokens of trees begin pieces anyway. Pieces are
/// merged by best-fit decreasing. Runs are nodes or, where cuts are, parts of nodes, in forest order. A
/// trajectory is placed in every micro-batch that its path touches. Siblings stand in forest order. Throws
/// InternalError where cuts are out of order or a piece is larger than the budget. Near linear in nodes, cuts
/// and placements.
std::vector<MicroBatch> partition_at(const Forest& forest, std::span<const int64_t> cuts,
                                     int64_t token_budget, Merge merge);

/// Cuts after which no piece exceeds the budget (>= 1, else InputError), chosen bottom-up: fewest
/// micro-batches first, then the smallest piece left to continue upwards. This is the algorithm of Kundu and
/// Misra, "A linear tree partitioning algorithm", SIAM J. Comput. 6 (1977), with every token a vertex of
/// weight one and with the siblings that are cut off together packed into micro-batches (as `merge` allows).
/// With Merge::kNone and cuts inside nodes the number of pieces is the smallest possible. Without
/// `cut_inside_nodes` only nodes longer than the budget are cut inside. O(n log n) for n nodes and cuts.
std::vector<int64_t> choose_cuts(const Forest& forest, int64_t token_budget, bool cut_inside_nodes,
                                 Merge merge);

/// What a partition costs, the most important first.
struct PartitionCost {
  int64_t micro_batches = 0;
  int64_t context_tokens = 0;     // read, over all micro-batches
  int64_t peak_chain_tokens = 0;  // the most tokens of a micro-batch and its ancestors: live at a time

  auto operator<=>(const PartitionCost&) const = default;
};

PartitionCost partition_cost(std::span<const MicroBatch> micro_batches);

/// The cheaper of the partitions with and without cuts inside nodes. Deterministic; an empty forest has no
/// micro-batches. Throws InputError for a budget below 1.
std::vector<MicroBatch> partition(const Forest& forest, int64_t token_budget, Merge merge);

}  // namespace espalier
