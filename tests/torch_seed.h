// SPDX-License-Identifier: Apache-2.0
// LibTorch's global random numbers, from which tensors without their own generator are drawn.
#pragma once

#include <cstdint>

namespace espalier::testing {

/// Seeds those of the CPU by test_seed(seed); each test starts with 1, whichever tests ran before it.
/// at::manual_seed would ask whether there is CUDA, which LibTorch asks once in a process, before a test can
/// open a device.
void seed_torch(uint64_t seed);

}  // namespace espalier::testing
