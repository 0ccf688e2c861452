// SPDX-License-Identifier: Apache-2.0
// Where a model runs, and with how many threads.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "espalier/base/options.h"

namespace espalier {

struct DeviceOptions {
  std::string device = "cpu";
  bool deterministic = false;

  /// `trains`: --deterministic as well.
  void add(OptionList* list, bool trains);
  /// Opens the device (runtime/device.h), whose kernels have proven themselves. Call before anything else of
  /// LibTorch.
  at::Device open() const;
};

/// --threads, which takes effect when it is set.
void add_threads(OptionList* list);

}  // namespace espalier
