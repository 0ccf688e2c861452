// SPDX-License-Identifier: Apache-2.0
// What verdicts on kernels depend on in a build (python/espalier/kernels).
#pragma once

#include <string>

namespace espalier {

/// A digest of the library of the operators, with their kernels.
std::string kernel_build();

}  // namespace espalier
