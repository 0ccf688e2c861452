// SPDX-License-Identifier: Apache-2.0
// Where a model runs, and with how many threads.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "espalier/base/options.h"
#include "espalier/ops/kernel_choice.h"

namespace espalier {

/// A device that is ready, and the kernels that an engine runs there.
struct Machine {
  at::Device device = at::kCPU;
  KernelChoice kernels = kernel_choice();
};

struct DeviceOptions {
  std::string device = "cpu";
  bool deterministic = false;

  /// `trains`: --deterministic as well.
  void add(OptionList* list, bool trains);
  /// Opens the device (runtime/device.h). Its kernels are those that have proven themselves and the products
  /// those of decide_products, as the environment changes them, which is read here. Call before anything else
  /// of LibTorch.
  Machine open() const;
};

/// --threads, which takes effect when it is set.
void add_threads(OptionList* list);

}  // namespace espalier
