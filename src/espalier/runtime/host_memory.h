// SPDX-License-Identifier: Apache-2.0
// Host memory that this process may take. Does not use LibTorch.
#pragma once

#include <cstdint>

namespace espalier {

/// Bytes that the kernel can give without swapping, within the limits of this process and of its control
/// groups (version 2), divided by the processes that torchrun has started on this machine.
int64_t available_host_memory();

}  // namespace espalier
