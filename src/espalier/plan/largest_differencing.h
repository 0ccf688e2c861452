// SPDX-License-Identifier: Apache-2.0
// Dividing numbers into sets of nearly equal sums.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace espalier {

/// The largest differencing method (Karmarkar and Karp, "The differencing method of set partitioning", 1982),
/// for `num_sets` >= 1 sets. It starts with one division per number and repeatedly joins the two divisions
/// whose largest and smallest sums differ most, the largest sets of one with the smallest of the other.
/// Returns the indices of each set, ascending. Ties go to the earlier number. Numbers must not be negative.
/// O(n (num_sets + log n)).
std::vector<std::vector<int64_t>> largest_differencing(std::span<const double> numbers, int64_t num_sets);

}  // namespace espalier
