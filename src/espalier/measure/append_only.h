// SPDX-License-Identifier: Apache-2.0
// What a trainer without trees can do: drop trajectories that others extend.
#pragma once

#include "espalier/data/trajectories.h"
#include "espalier/tree/forest.h"

namespace espalier {

/// The trajectories that are left after append-only merging (ForestStatistics), one for every leaf of
/// `forest`, which is that of all rows of `trajectories`. Each has the loss weights of those that were merged
/// into it added to its own: a trajectory that ends inside others is merged into the first of them in
/// preorder. So for sft with shared targets summed, normalised by token or by a constant, loss and gradients
/// stay the same. Other columns are left out.
Trajectories merge_append_only(const Trajectories& trajectories, const Forest& forest);

}  // namespace espalier
