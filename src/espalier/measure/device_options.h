// SPDX-License-Identifier: Apache-2.0
// Where a model runs, and with how many threads.
#pragma once

#include <c10/core/Device.h>

#include "espalier/measure/device_flags.h"

namespace espalier {

struct DeviceOptions : DeviceFlags {
  /// Opens the device (runtime/device.h), whose kernels have proven themselves. Call before anything else of
  /// LibTorch.
  at::Device open() const;
};

/// --threads, which LibTorch's number of threads becomes when it is set.
void add_threads(OptionList* list);

}  // namespace espalier
