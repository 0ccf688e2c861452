// SPDX-License-Identifier: Apache-2.0
// The implementation of tree attention on CUDA, in tests.
#pragma once

#include "tests/environment_variable.h"

namespace espalier::testing {

/// Sets ESPALIER_ATTENTION while it lives; null: unsets it.
class ForcedAttention : ForcedVariable {
 public:
  explicit ForcedAttention(const char* name) : ForcedVariable("ESPALIER_ATTENTION", name) {}
};

}  // namespace espalier::testing
