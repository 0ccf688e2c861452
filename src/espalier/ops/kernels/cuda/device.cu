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
  const auto [entry, is_new] = known.try_emplace(device);
  if (is_new) {
    const auto attribute = [&](cudaDeviceAttr which) {
      int value = 0;
      check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
      return value;
    };
    entry->second = {
        10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor),
        attribute(cudaDevAttrMultiProcessorCount), attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
        attribute(cudaDevAttrL2CacheSize)};
  }
  return entry->second;
}

}  // namespace espalier::cuda
