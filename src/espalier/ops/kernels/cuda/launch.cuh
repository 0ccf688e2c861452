// SPDX-License-Identifier: Apache-2.0
// Common launch function of all kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace espalier::cuda {

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

struct Launch {
  dim3 blocks;
  int threads;
  int64_t shared_bytes;
  void* stream;  // cudaStream_t
};

/// Runs `kernel`, a __global__ function of one struct. Throws std::runtime_error with the name if the launch
/// fails; later errors appear at the next synchronisation.
template <class Params>
void launch(const char* name, void (*kernel)(Params), const Launch& how, const Params& params) {
  constexpr int64_t kSharedBytesOfAnyKernel = 48 << 10;
  if (how.shared_bytes > kSharedBytesOfAnyKernel) {
    check(
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(how.shared_bytes)),
        name);
  }
  if (how.blocks.x == 0 || how.blocks.y == 0 || how.blocks.z == 0) return;
  kernel<<<how.blocks, how.threads, how.shared_bytes, static_cast<cudaStream_t>(how.stream)>>>(params);
  check(cudaGetLastError(), name);
}

}  // namespace espalier::cuda
