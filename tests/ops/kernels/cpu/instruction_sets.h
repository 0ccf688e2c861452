// SPDX-License-Identifier: Apache-2.0
// The instruction sets of InstructionSet that this machine has.
#pragma once

#include <vector>

#include "espalier/ops/kernels/cpu/instruction_set.h"
#include "tests/ops/kernels/cpu/forced_instruction_set.h"

namespace espalier::testing {

/// Whatever ESPALIER_CPU says.
inline std::vector<InstructionSet> instruction_sets_of_this_machine() {
  const ForcedInstructionSet best("");
  std::vector<InstructionSet> sets;
  for (const InstructionSet isa : {InstructionSet::kDefault, InstructionSet::kAvx2, InstructionSet::kAvx512,
                                   InstructionSet::kAvx512Bf16, InstructionSet::kAmx}) {
    if (isa <= instruction_set()) sets.push_back(isa);
  }
  return sets;
}

}  // namespace espalier::testing
