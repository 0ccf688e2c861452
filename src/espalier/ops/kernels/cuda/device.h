// SPDX-License-Identifier: Apache-2.0
// Properties of the current GPU.
#pragma once

#include <cstdint>

namespace espalier::cuda {

struct DeviceProperties {
  int compute_capability;  // 10 major + minor: 80, 90
  int multiprocessors;
  int64_t shared_bytes;  // shared memory per block
  int64_t cache_bytes;   // L2 cache
};

/// Properties of the calling thread's current device. Throws std::runtime_error if there is none.
const DeviceProperties& device_properties();

/// Whether work on `stream`, a cudaStream_t, is being captured into a CUDA graph.
bool is_capturing(void* stream);

}  // namespace espalier::cuda
