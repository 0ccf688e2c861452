// SPDX-License-Identifier: Apache-2.0
// How much memory tensors take.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace espalier {

/// Counts every tensor allocation on the CPU from now on. Call once, before tensors are made: what was
/// allocated before is not counted, and neither is what is not a tensor.
void count_tensor_memory();

/// Keeps freed memory in the process for the next tensors. Otherwise every large tensor comes in fresh pages,
/// which the kernel clears one by one. For the C library of GNU; elsewhere nothing happens. Call once.
void reuse_freed_memory();

/// Bytes that tensors hold on the device now, and the most they held since the last reset_peak_tensor_memory.
/// On CUDA as LibTorch's allocator counts them, rounded up to its blocks but without what it keeps for later;
/// on the CPU those that are counted, 0 where nothing is.
int64_t tensor_memory(at::Device device = at::kCPU);
int64_t peak_tensor_memory(at::Device device = at::kCPU);
void reset_peak_tensor_memory(at::Device device = at::kCPU);

}  // namespace espalier
