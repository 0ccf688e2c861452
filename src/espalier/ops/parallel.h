// SPDX-License-Identifier: Apache-2.0
// Loops in parallel for sources that are not compiled with OpenMP, where at::parallel_for would be serial.
#pragma once

#include <cstdint>
#include <functional>

namespace espalier {

/// Calls work(begin, end) for ranges that together are [0, count), of at least `grain` where there are as
/// many, on LibTorch's threads. An exception of `work` reaches the caller.
void parallel_ranges(int64_t count, int64_t grain,
                     const std::function<void(int64_t begin, int64_t end)>& work);

}  // namespace espalier
