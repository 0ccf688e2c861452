// SPDX-License-Identifier: Apache-2.0
// Append-only merging: trajectories that are prefixes of others are dropped.
#pragma once

#include "espalier/data/trajectories.h"
#include "espalier/tree/forest.h"

namespace espalier {

/// The trajectories left after append-only merging (ForestStatistics), one per leaf of `forest`, the forest
/// of all rows of `trajectories`. A trajectory that ends inside others is merged into the first of them in
/// preorder: its loss weights are added there. So loss and gradients of sft are unchanged with shared targets
/// `sum`, normalised by token or by a constant. Other columns are dropped.
Trajectories merge_append_only(const Trajectories& trajectories, const Forest& forest);

}  // namespace espalier
