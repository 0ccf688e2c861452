// SPDX-License-Identifier: Apache-2.0
// Whether tests can run on CUDA.
#pragma once

#include <dlfcn.h>

#include "espalier/base/check.h"
#include "espalier/runtime/device.h"

namespace espalier::testing {

/// Opens the first GPU, as programs do. To be called before anything that asks ATen about CUDA.
inline bool has_cuda_device() {
  static const bool result = [] {
    if (dlopen("libcuda.so.1", RTLD_LAZY) == nullptr) return false;  // no driver: do not load gigabytes
    try {
      open_device(at::Device(at::kCUDA, 0));
      return true;
    } catch (const InputError&) {
      return false;
    }
  }();
  return result;
}

}  // namespace espalier::testing

#define SKIP_WITHOUT_CUDA() \
  if (!espalier::testing::has_cuda_device()) GTEST_SKIP() << "no CUDA device is visible"
