// SPDX-License-Identifier: Apache-2.0
// Trajectories for benchmarks: random groups, rollouts and conversations; append-only merging.
#pragma once

#include <cstdint>

#include "espalier/base/csr.h"
#include "espalier/data/trajectories.h"
#include "espalier/tree/forest.h"

namespace espalier {

struct WorkloadSizes {
  int64_t tree_tokens = 2048;    // of forest_of_ratio
  int64_t flat_tokens = 24'000;  // of forest_of_por
  int64_t leaves = 32;           // likewise
  int64_t agent_tokens = 6'000;  // of branching_rollouts and conversation
  uint64_t seed = 0;
};

/// Trajectories with loss on the last part, as on an agent's turn: `loss_rate` of the tokens, at least one.
Trajectories with_loss(const Csr<int32_t>& sequences, double loss_rate);

/// A tree of about tree_tokens tokens with flat / tree near `ratio`. For ratio 1: four unrelated chains.
/// Otherwise three levels, like agent rollouts, as long as nodes have at least eight tokens on average, else
/// a group: one prompt with many responses.
Csr<int32_t> forest_of_ratio(const WorkloadSizes& sizes, double ratio, int64_t vocab_size);

/// One prompt with `leaves` responses and the given POR; flat_tokens does not depend on it. The sweep of
/// "Tree Training" (arXiv 2511.00413), section 3.1.
Csr<int32_t> forest_of_por(const WorkloadSizes& sizes, double por, int64_t vocab_size);

/// A complete tree of about agent_tokens tokens: rollouts that branch at every turn.
Csr<int32_t> branching_rollouts(const WorkloadSizes& sizes, int64_t depth, int64_t branching,
                                int64_t vocab_size);

/// A conversation of about agent_tokens tokens with two answers per turn; the second one is continued. Every
/// answer ends a trajectory.
Csr<int32_t> conversation(const WorkloadSizes& sizes, int64_t vocab_size);

/// The trajectories left after append-only merging (ForestStatistics), one per leaf of `forest`, the forest
/// of all rows of `trajectories`. A trajectory that ends inside others is merged into the first of them in
/// preorder: its loss weights are added there. So loss and gradients of sft are unchanged with shared targets
/// `sum`, normalised by token or by a constant. Other columns are dropped.
Trajectories merge_append_only(const Trajectories& trajectories, const Forest& forest);

}  // namespace espalier
