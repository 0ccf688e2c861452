// Whether tests can run on CUDA.
#pragma once

#include <ATen/Context.h>
#include <c10/core/Device.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>

#include <string>

namespace espalier::testing {

/// Loads the CUDA half of LibTorch, which nothing links, from beside the other half; says whether a device is
/// visible. To be called before anything that asks ATen about CUDA.
inline bool has_cuda_device() {
  static const bool result = [] {
    if (dlopen("libcuda.so.1", RTLD_LAZY) == nullptr) return false;  // no driver: do not load gigabytes
    Dl_info library{};
    if (dladdr(reinterpret_cast<void*>(&at::globalContext), &library) == 0) return false;
    const std::string cpu = library.dli_fname;
    const std::string cuda = cpu.substr(0, cpu.rfind('/') + 1) + "libtorch_cuda.so";
    if (dlopen(cuda.c_str(), RTLD_LAZY | RTLD_GLOBAL) == nullptr) return false;
    return c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA) &&
           c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA)->deviceCount() > 0;
  }();
  return result;
}

}  // namespace espalier::testing

#define SKIP_WITHOUT_CUDA() \
  if (!espalier::testing::has_cuda_device()) GTEST_SKIP() << "no CUDA device is visible"
