// SPDX-License-Identifier: Apache-2.0
// Distributes the trajectories of a step over ranks.
//
// A rank encodes the forest of its trajectories. Whole trees are assigned to ranks, the longest first
// (Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969), and then moved and
// swapped. A tree that takes longer than the mean of the ranks is split into branches. Every part encodes its
// prefix again, which its price includes; parts of one tree on the same rank share it.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/plan/time_model.h"
#include "espalier/tree/forest.h"

namespace espalier {

/// The share of one rank: ascending trajectories, and the predicted seconds of their trees. A rank without
/// trajectories must take part in the step's reductions with zero gradients.
struct RankShare {
  std::vector<int64_t> trajectories;
  double seconds = 0;
  int64_t tree_tokens = 0;
};

struct RankPlan {
  std::vector<RankShare> ranks;
  int64_t context_parallel = 1;  // ranks that have each share together
  int64_t split_trees = 0;       // trees that are on several ranks
  int64_t repeated_tokens = 0;   // the tokens of all ranks less those of the forest
  double least_seconds = 0;      // a lower bound: the forest's seconds over the ranks, or its longest path

  double seconds() const;    // of the slowest rank
  double imbalance() const;  // seconds() over the mean of all ranks, less 1; 0 if there is no work
};

/// Seconds of the first `tokens` tokens of a root path, forward and backward, every token with loss. The
/// price of a forest is a sum of these: each path adds the seconds of its tokens less those of the tokens
/// that it shares.
double path_seconds(const TimeModel& model, int64_t tokens);

/// Distributes the forest over `num_ranks` ranks (1 to 1,000,000, else InputError). Ignores fixed costs of
/// micro-batches, which do not depend on the distribution. Deterministic for equal costs.
RankPlan distribute(const Forest& forest, int64_t num_ranks, const TimeModel& model);

/// Likewise, where `context_parallel` ranks compute the same trees together, each a part: a divisor of
/// num_ranks, or 0 for the fastest of them. Every rank is taken to have an equal part of the work, and to
/// receive what the others compute, the most that is possible, in `seconds_per_token`: keys and values, and
/// their gradients.
RankPlan distribute(const Forest& forest, int64_t num_ranks, const TimeModel& model, int64_t context_parallel,
                    double seconds_per_token);

/// For comparison, the distribution of trainers without trees: whole trajectories, encoded separately,
/// divided by largest differencing (packing.h). Their tokens are counted as tree_tokens;
/// split_trees is 0.
RankPlan distribute_trajectories(const Forest& forest, int64_t num_ranks, const TimeModel& model);

}  // namespace espalier
