// SPDX-License-Identifier: Apache-2.0
// The families of kernels in this build, by name.
#pragma once

#include <c10/core/Device.h>

#include <string>
#include <vector>

#include "espalier/qualify/qualify.h"

namespace espalier::qualify {

/// The implementations of attention for a kind of device, the first to be taken first: on CUDA hopper,
/// ampere, varlen and masked (ops/attention/cuda.h), on the CPU cpu. Then what every kind of device has:
/// elementwise, head, distribution and products (operator_families.h).
std::vector<std::string> kernel_families(c10::DeviceType kind);

/// Checks one of them on an open device (attention_family.h, operator_family.h). Throws InputError where this
/// kind of device has none of this name.
Finding check_family(const std::string& name, c10::Device device);

}  // namespace espalier::qualify
