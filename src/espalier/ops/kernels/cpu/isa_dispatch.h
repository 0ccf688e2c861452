// SPDX-License-Identifier: Apache-2.0
// Declares functions that are compiled once per InstructionSet, and selects among them.
#pragma once

#include "espalier/ops/kernels/cpu/instruction_set.h"

/// ESPALIER_DECLARE_ISAS(declaration): the declaration, in the namespace of each instruction set.
/// ESPALIER_OF_ISA(isa, call): `call` in the namespace of the best instruction set that is not above `isa`.
#ifdef __x86_64__
#define ESPALIER_DECLARE_ISAS(...) \
  namespace cpu_default {          \
  __VA_ARGS__;                     \
  }                                \
  namespace cpu_avx2 {             \
  __VA_ARGS__;                     \
  }                                \
  namespace cpu_avx512 {           \
  __VA_ARGS__;                     \
  }
#define ESPALIER_OF_ISA(isa, ...)                             \
  ((isa) >= InstructionSet::kAvx512 ? cpu_avx512::__VA_ARGS__ \
   : (isa) >= InstructionSet::kAvx2 ? cpu_avx2::__VA_ARGS__   \
                                    : cpu_default::__VA_ARGS__)
#else
#define ESPALIER_DECLARE_ISAS(...) \
  namespace cpu_default {          \
  __VA_ARGS__;                     \
  }
#define ESPALIER_OF_ISA(isa, ...) (static_cast<void>(isa), cpu_default::__VA_ARGS__)
#endif
