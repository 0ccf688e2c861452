// SPDX-License-Identifier: Apache-2.0
// The levels of InstructionSet that this machine has.
#pragma once

#include <vector>

#include "espalier/ops/kernels/cpu/instruction_set.h"
#include "tests/ops/kernels/cpu/forced_level.h"

namespace espalier::testing {

/// Whatever ESPALIER_CPU says.
inline std::vector<InstructionSet> levels_of_this_machine() {
  const ForcedLevel best("");
  std::vector<InstructionSet> levels;
  for (const InstructionSet level : {InstructionSet::kDefault, InstructionSet::kAvx2, InstructionSet::kAvx512,
                                     InstructionSet::kAvx512Bf16, InstructionSet::kAmx}) {
    if (level <= instruction_set()) levels.push_back(level);
  }
  return levels;
}

}  // namespace espalier::testing
