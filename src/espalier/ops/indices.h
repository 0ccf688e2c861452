// SPDX-License-Identifier: Apache-2.0
// Lists of indices that the host computes, as tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace espalier::detail {

/// [N] int64 on the device. The host does not wait for it.
at::Tensor to_indices(const std::vector<int64_t>& values, at::Device device);

}  // namespace espalier::detail
