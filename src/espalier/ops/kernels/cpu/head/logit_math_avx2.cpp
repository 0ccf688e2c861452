// SPDX-License-Identifier: Apache-2.0
// LogitMath for InstructionSet avx2; CMakeLists.txt gives this file the matching instruction set.
#define ESPALIER_CPU_NAMESPACE cpu_avx2
#include "espalier/ops/kernels/cpu/head/logit_math_loops.h"
