// Whether tests can run on CUDA.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>

namespace espalier::testing {

/// Loads the CUDA half of LibTorch, if there is one; says whether a device is visible. To be called before
/// anything that asks ATen about CUDA.
inline bool has_cuda_device() {
  static const bool result = [] {
    if (dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) return false;
    return c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA) &&
           c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA)->deviceCount() > 0;
  }();
  return result;
}

}  // namespace espalier::testing
