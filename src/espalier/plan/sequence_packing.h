// Sequence packing: the baseline that shares nothing.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/plan/plan.h"

namespace espalier {

/// Every trajectory a chain of its own (best-fit decreasing): nothing is shared. Runs are stretches of the
/// path whose forest tokens are contiguous. Micro-batches stand in the order of their largest trajectory,
/// decreasing, ties by trajectory. `budget` is at least longest_trajectory(forest).
std::vector<MicroBatch> pack_sequences(const Forest& forest, int64_t budget);

}  // namespace espalier
