// SPDX-License-Identifier: Apache-2.0
// Prompts of trajectories, and how they are grouped. Does not use LibTorch.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/data/trajectories.h"
#include "espalier/tree/forest.h"

namespace espalier {

/// Size of the row's prompt: the tokens before the first one with loss. The whole row if no token carries
/// loss or the first one does, as in rows without a mask.
int64_t prompt_size(const Trajectories& trajectories, int64_t row);

/// The prompts, one row per row of the data. `whole_rows`: all tokens of the rows, for completions that
/// continue tokens with loss; throws InputError if a row lacks log-probabilities of those.
Trajectories prompts_of(const Trajectories& trajectories, bool whole_rows = false);

/// The trajectories of a forest in preorder, so that those with a shared prefix are adjacent, in groups of at
/// most `token_budget` tree tokens; a longer trajectory forms its own group. Trajectories that end at the
/// same node keep their order.
std::vector<std::vector<int64_t>> prompt_groups(const Forest& forest, int64_t token_budget);

}  // namespace espalier
