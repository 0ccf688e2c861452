// SPDX-License-Identifier: Apache-2.0
// Memory usage of tensors.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace espalier {

/// Starts counting tensor allocations on the CPU. Call once, before tensors are created; earlier allocations
/// and other memory are not counted.
void count_tensor_memory();

/// Keeps freed memory in the process for later tensors. Otherwise every large tensor uses fresh pages, which
/// the kernel must clear. glibc only. Call once.
void reuse_freed_memory();

/// Current bytes of tensors on the device, and the peak since the last reset_peak_tensor_memory. On CUDA as
/// counted by LibTorch's allocator: rounded up to its blocks, without cached memory. On the CPU 0 unless
/// counted.
int64_t tensor_memory(at::Device device = at::kCPU);
int64_t peak_tensor_memory(at::Device device = at::kCPU);
void reset_peak_tensor_memory(at::Device device = at::kCPU);

}  // namespace espalier
