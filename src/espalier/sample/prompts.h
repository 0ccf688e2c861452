// SPDX-License-Identifier: Apache-2.0
// Prompts of trajectories, and which of them are worked on together. Free of LibTorch.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/data/trajectories.h"
#include "espalier/tree/forest.h"

namespace espalier {

/// Tokens of the row's prompt: those before the first one with loss. The whole row where none carries loss,
/// or where the first one does, as in rows without a mask.
int64_t prompt_size(const Trajectories& trajectories, int64_t row);

/// The prompts alone, one row for each row of the data. `whole_rows`: all tokens of the rows, for completions
/// that go on from tokens with loss; throws InputError where a row has no log-probabilities of such.
Trajectories prompts_of(const Trajectories& trajectories, bool whole_rows = false);

/// The trajectories of a forest in preorder, so that those that share a prefix are neighbours, in groups of
/// at most `token_budget` tree tokens each; one that is longer is a group by itself. Trajectories that end at
/// one place keep their order.
std::vector<std::vector<int64_t>> prompt_groups(const Forest& forest, int64_t token_budget);

}  // namespace espalier
