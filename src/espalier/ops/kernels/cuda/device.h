// SPDX-License-Identifier: Apache-2.0
// The GPU that kernels run on.
#pragma once

#include <cstdint>

namespace espalier::cuda {

struct DeviceProperties {
  int compute_capability;  // 10 major + minor: 80, 90
  int multiprocessors;
  int64_t shared_bytes;  // that a block may have
  int64_t cache_bytes;   // of the second level
};

/// Of the calling thread's current device. Throws std::runtime_error where there is none.
const DeviceProperties& device_properties();

/// Whether work on `stream`, a cudaStream_t, is being captured into a graph instead of running.
bool is_capturing(void* stream);

}  // namespace espalier::cuda
