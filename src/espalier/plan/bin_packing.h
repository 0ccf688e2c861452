// Packing items into bins of one capacity.
#pragma once

#include <cstdint>
#include <vector>

namespace espalier {

/// Best-fit decreasing: the largest item first, each into the fullest bin that still holds it. Ties: the
/// earlier item, the older bin. Returns the items of each bin, ascending, bins in the order of opening.
/// Sizes are at most `capacity`. O(n log n).
std::vector<std::vector<int64_t>> best_fit_decreasing(const std::vector<int64_t>& sizes, int64_t capacity);

}  // namespace espalier
