// SPDX-License-Identifier: Apache-2.0
// Runs kernels written in the words of simt.h on the host, thread by thread.
// Threads of a block are fibers. Which one goes on is drawn by a seed wherever one waits, one warp at a time
// is starved for a while, blocks come in an order drawn likewise, shared memory and the targets of
// asynchronous copies hold NaN until something is there, and copies arrive as late as the kernel's waits
// allow: what a kernel forgot to wait for shows, and a seed repeats it. Under the address sanitizer every
// access to global and shared memory is checked.
#pragma once

#include <cstdint>
#include <functional>

#include "espalier/ops/kernels/cuda/simt.h"

namespace espalier::testing {

struct EmulatedLaunch {
  int blocks[3] = {1, 1, 1};
  int threads = 32;  // a multiple of 32
  int64_t shared_bytes = 0;
  uint64_t seed = 0;
};

struct EmulatedCounts {
  int64_t matrix_reads = 0;     // 8 rows of 16 bytes each
  int64_t matrix_accesses = 0;  // to shared memory that they took: as many, without bank conflicts
  int64_t products = 0;         // multiply_add of a warp
};

/// Runs `kernel` as every thread of every block. Throws std::logic_error where threads wait for each other
/// forever, lanes of a warp meet in different collectives, a thread ends inside a collective of its warp, or
/// an address is not aligned as it has to be.
EmulatedCounts emulate(const EmulatedLaunch& launch, const std::function<void()>& kernel);

}  // namespace espalier::testing
