// SPDX-License-Identifier: Apache-2.0
// RowMath for InstructionSet avx2; CMakeLists.txt gives this file the matching instruction set.
#define ESPALIER_CPU_NAMESPACE cpu_avx2
#include "espalier/ops/kernels/cpu/pointwise/row_math_loops.h"
