// SPDX-License-Identifier: Apache-2.0
// Where a model runs, and with how many threads.
#pragma once

#include <c10/core/Device.h>

#include "espalier/distributed/group.h"
#include "espalier/measure/device_flags.h"
#include "espalier/ops/kernel_choice.h"

namespace espalier {

/// An open device, and the kernels that an engine runs there.
struct Machine {
  at::Device device = at::kCPU;
  KernelChoice kernels = kernel_choice();
};

struct DeviceOptions : DeviceFlags {
  /// Opens the device (runtime/device.h). Chooses the kernels that have passed their checks and the products
  /// of decide_products, as changed by the environment, which is read here; of several ranks, those of the
  /// first. Call before anything else of LibTorch.
  Machine open(const Group& group = alone()) const;
};

/// --threads, which LibTorch's number of threads becomes when it is set.
void add_threads(OptionList* list);

}  // namespace espalier
