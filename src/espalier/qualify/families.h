// SPDX-License-Identifier: Apache-2.0
// The kernel families of this build, by name.
#pragma once

#include <c10/core/Device.h>

#include <string>
#include <vector>

#include "espalier/qualify/qualify.h"

namespace espalier::qualify {

/// The attention implementations of a device type, in order of preference: on CUDA library, ampere and masked
/// (ops/attention/cuda.h), on the CPU cpu. Then, on every device type: head, distribution and products
/// (operator_families.h).
std::vector<std::string> kernel_families(c10::DeviceType kind);

/// Checks one of them on an open device (attention_family.h, operator_family.h). Throws InputError if the
/// device type has no family of this name.
Finding check_family(const std::string& name, c10::Device device);

}  // namespace espalier::qualify
