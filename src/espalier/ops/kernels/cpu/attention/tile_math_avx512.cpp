// SPDX-License-Identifier: Apache-2.0
// TileMath for InstructionSet avx512; CMakeLists.txt gives this file the matching instruction set.
#define ESPALIER_CPU_NAMESPACE cpu_avx512
#include "espalier/ops/kernels/cpu/attention/tile_math_loops.h"
