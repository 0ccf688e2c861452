// SPDX-License-Identifier: Apache-2.0
// Sequence packing: the baseline that shares nothing.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/plan/plan.h"

namespace espalier {

/// Packs every trajectory as a separate chain, by best-fit decreasing. Nothing is shared. Runs are the
/// maximal parts of the path whose forest tokens are contiguous. Micro-batches are sorted by their largest
/// trajectory, descending; ties go by trajectory. `budget` must be at least longest_trajectory(forest).
std::vector<MicroBatch> pack_sequences(const Forest& forest, int64_t budget);

}  // namespace espalier
