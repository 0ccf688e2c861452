// SPDX-License-Identifier: Apache-2.0
// The CPU instruction set of tests.
#pragma once

#include "tests/environment_variable.h"

namespace espalier::testing {

/// Sets ESPALIER_CPU while it lives; "": the machine's best.
class ForcedInstructionSet : ForcedVariable {
 public:
  explicit ForcedInstructionSet(const char* name) : ForcedVariable("ESPALIER_CPU", name) {}
};

}  // namespace espalier::testing
