// SPDX-License-Identifier: Apache-2.0
// Slices of a set of trajectories, without a copy.
#pragma once

#include <cstdint>

#include "espalier/data/trajectories.h"

namespace espalier {

/// Rows [begin, end) as views of the columns, which stay alive as long as the slice does.
Trajectories slice_rows(const Trajectories& trajectories, int64_t begin, int64_t end);

}  // namespace espalier
