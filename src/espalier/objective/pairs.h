// SPDX-License-Identifier: Apache-2.0
// What preferences ask of the data.
#pragma once

#include "espalier/data/trajectories.h"

namespace espalier {

/// Throws InputError naming a trajectory or a pair, unless every trajectory has a `pair_id` and `chosen`, and
/// every pair is one chosen and one rejected trajectory, each with a token that carries loss.
void check_pairs(const Trajectories& trajectories);

/// Throws InputError where no trajectory has `chosen`.
void check_some_chosen(const Trajectories& trajectories);

}  // namespace espalier
