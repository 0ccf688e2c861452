// SPDX-License-Identifier: Apache-2.0
// LogitMath for InstructionSet default; CMakeLists.txt gives this file the matching instruction set.
#define ESPALIER_CPU_NAMESPACE cpu_default
#include "espalier/ops/kernels/cpu/head/logit_math_loops.h"
