// SPDX-License-Identifier: Apache-2.0
// How functions that are compiled once for every InstructionSet are declared, and the one of a level found.
#pragma once

#include "espalier/ops/kernels/cpu/instruction_set.h"

/// ESPALIER_DECLARE_LEVELS(declaration): it, in the namespace of each level.
/// ESPALIER_OF_LEVEL(level, call): `call` in the namespace of the best level that is not above `level`.
#ifdef ESPALIER_X86
#define ESPALIER_DECLARE_LEVELS(...) \
  namespace cpu_default {            \
  __VA_ARGS__;                       \
  }                                  \
  namespace cpu_avx2 {               \
  __VA_ARGS__;                       \
  }                                  \
  namespace cpu_avx512 {             \
  __VA_ARGS__;                       \
  }
#define ESPALIER_OF_LEVEL(level, ...)                           \
  ((level) >= InstructionSet::kAvx512 ? cpu_avx512::__VA_ARGS__ \
   : (level) >= InstructionSet::kAvx2 ? cpu_avx2::__VA_ARGS__   \
                                      : cpu_default::__VA_ARGS__)
#else
#define ESPALIER_DECLARE_LEVELS(...) \
  namespace cpu_default {            \
  __VA_ARGS__;                       \
  }
#define ESPALIER_OF_LEVEL(level, ...) (static_cast<void>(level), cpu_default::__VA_ARGS__)
#endif
