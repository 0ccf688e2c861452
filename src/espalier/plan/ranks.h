// SPDX-License-Identifier: Apache-2.0
// Which trajectories of a step each of several ranks trains on.
//
// A rank encodes the forest of its own trajectories. Whole trees go to ranks, the longest first, and are then
// moved and swapped (Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969). A
// tree that takes more than a rank's mean is split into branches. Every part encodes its prefix again, which
// its price holds; parts of one tree that meet on a rank share it again.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/plan/time_model.h"
#include "espalier/tree/forest.h"

namespace espalier {

/// What one rank trains on: ascending trajectories, and the seconds that its trees are predicted to take. A
/// rank without trajectories has to take part in the step's reductions with gradients of zero.
struct RankShare {
  std::vector<int64_t> trajectories;
  double seconds = 0;
  int64_t tree_tokens = 0;
};

struct RankPlan {
  std::vector<RankShare> ranks;
  int64_t split_trees = 0;      // trees that are on several ranks
  int64_t repeated_tokens = 0;  // the tokens of all ranks less those of the forest
  double least_seconds = 0;     // no plan is faster: the mean of the forest's seconds, or its longest path

  double seconds() const;    // of the slowest rank
  double imbalance() const;  // seconds() over the mean of all ranks, less 1; 0 where nothing takes time
};

/// Seconds of the first `tokens` tokens of a root path, forward and backward, every token with loss. The
/// price of a forest is additive in these: a path adds those of all its tokens less those that it shares.
double path_seconds(const TimeModel& model, int64_t tokens);

/// Distributes the forest over `num_ranks` (1 to 1,000,000, else InputError). Fixed costs of micro-batches
/// are left out, as they are the same wherever a token goes. Deterministic for equal costs.
RankPlan distribute(const Forest& forest, int64_t num_ranks, const TimeModel& model);

/// For comparison, what trainers without trees do: whole trajectories, each encoded by itself, are divided by
/// largest differencing (largest_differencing.h). Their tokens are counted as
/// tree_tokens; split_trees is 0.
RankPlan distribute_trajectories(const Forest& forest, int64_t num_ranks, const TimeModel& model);

}  // namespace espalier
