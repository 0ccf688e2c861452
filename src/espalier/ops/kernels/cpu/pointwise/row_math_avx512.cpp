// SPDX-License-Identifier: Apache-2.0
// RowMath for InstructionSet avx512; CMakeLists.txt gives this file the matching instruction set.
#define ESPALIER_CPU_NAMESPACE cpu_avx512
#include "espalier/ops/kernels/cpu/pointwise/row_math_loops.h"
