// SPDX-License-Identifier: Apache-2.0
// Conversion of index lists to tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace espalier::detail {

/// [N] int64 on the device, without synchronisation.
at::Tensor to_indices(const std::vector<int64_t>& values, at::Device device);

}  // namespace espalier::detail
