// SPDX-License-Identifier: Apache-2.0
// Trajectories for benchmarks: random trees of a given sharing.
#pragma once

#include <cstdint>

#include "espalier/base/csr.h"
#include "espalier/data/trajectories.h"

namespace espalier {

/// Trajectories with loss on the last part, as on an agent's turn: `loss_rate` of the tokens, at least one.
Trajectories with_loss(const Csr<int32_t>& sequences, double loss_rate);

/// A tree of about `tree_tokens` tokens with flat / tree near `ratio`. For ratio 1: four unrelated chains.
/// Otherwise three levels, like agent rollouts, as long as nodes have at least eight tokens on average, else
/// a group: one prompt with many responses.
Csr<int32_t> forest_of_ratio(int64_t tree_tokens, double ratio, int64_t vocab_size, uint64_t seed);

}  // namespace espalier
