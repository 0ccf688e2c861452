// SPDX-License-Identifier: Apache-2.0
// Random trajectories to measure on, of the shapes that matter: groups, agent rollouts, long conversations.
#pragma once

#include <cstdint>

#include "espalier/base/csr.h"
#include "espalier/data/trajectories.h"

namespace espalier {

struct WorkloadSizes {
  int64_t tree_tokens = 2048;    // of forest_of_ratio
  int64_t flat_tokens = 24'000;  // of forest_of_por
  int64_t leaves = 32;           // likewise
  int64_t agent_tokens = 6'000;  // of branching_rollouts and conversation
  uint64_t seed = 0;
};

/// Sequences with loss on the last part of every trajectory, as on an agent's own turn: `loss_rate` of its
/// tokens, one at least.
Trajectories with_loss(const Csr<int32_t>& sequences, double loss_rate);

/// A tree of about tree_tokens tokens whose flat / tree is near `ratio`. 1: four unrelated chains. Else three
/// levels, as of agent rollouts, while nodes keep eight tokens on average; beyond that a group: one prompt
/// with many responses.
Csr<int32_t> forest_of_ratio(const WorkloadSizes& sizes, double ratio, int64_t vocab_size);

/// One prompt with `leaves` responses, flat_tokens tokens in all, whatever the POR: the sweep of "Tree
/// Training" (arXiv 2511.00413), section 3.1.
Csr<int32_t> forest_of_por(const WorkloadSizes& sizes, double por, int64_t vocab_size);

/// A complete tree of about agent_tokens tokens: rollouts that branch at every turn.
Csr<int32_t> branching_rollouts(const WorkloadSizes& sizes, int64_t depth, int64_t branching,
                                int64_t vocab_size);

/// One long conversation of about agent_tokens tokens with two answers at each of its turns, of which the
/// second goes on: every answer ends a trajectory.
Csr<int32_t> conversation(const WorkloadSizes& sizes, int64_t vocab_size);

}  // namespace espalier
