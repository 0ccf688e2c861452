// SPDX-License-Identifier: Apache-2.0
// Checks of the data for preference objectives.
#pragma once

#include "espalier/data/trajectories.h"

namespace espalier {

/// Throws InputError naming a trajectory or pair unless every trajectory has `pair_id` and `chosen`, and
/// every pair has one chosen and one rejected trajectory, each with a token that carries loss.
void check_pairs(const Trajectories& trajectories);

/// Throws InputError if no trajectory has `chosen`.
void check_some_chosen(const Trajectories& trajectories);

}  // namespace espalier
