// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cuda/device.h"

#include <map>
#include <mutex>

#include "espalier/ops/kernels/cuda/launch.cuh"

namespace espalier::cuda {

const DeviceProperties& device_properties() {
  static std::mutex mutex;
  static std::map<int, DeviceProperties> known;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const std::scoped_lock lock(mutex);
  if (const auto entry = known.find(device); entry != known.end()) return entry->second;
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
    return value;
  };
  const DeviceProperties properties{
      10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor),
      attribute(cudaDevAttrMultiProcessorCount), attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
      attribute(cudaDevAttrL2CacheSize)};
  return known.emplace(device, properties).first->second;
}

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace espalier::cuda
