// SPDX-License-Identifier: Apache-2.0
// Some of a set of trajectories, without a copy.
#pragma once

#include <cstdint>

#include "espalier/data/trajectories.h"

namespace espalier {

/// Rows [begin, end) of the trajectories, whose columns it views: they stay in memory as long as it does.
Trajectories slice_rows(const Trajectories& trajectories, int64_t begin, int64_t end);

}  // namespace espalier
