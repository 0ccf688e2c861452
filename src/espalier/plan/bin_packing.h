// SPDX-License-Identifier: Apache-2.0
// Packing items into bins of one capacity.
#pragma once

#include <cstdint>
#include <vector>

namespace espalier {

/// Best-fit decreasing: items are packed from the largest to the smallest, each into the fullest bin that
/// that it still fits in. Ties go to the earlier item and the older bin. Returns the items of each bin in
/// ascending order, and the bins in the order in which they were opened. Every size must be at most
/// `capacity`. O(n log n).
std::vector<std::vector<int64_t>> best_fit_decreasing(const std::vector<int64_t>& sizes, int64_t capacity);

}  // namespace espalier
