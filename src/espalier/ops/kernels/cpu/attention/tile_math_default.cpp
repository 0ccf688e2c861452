// SPDX-License-Identifier: Apache-2.0
// TileMath for InstructionSet default; CMakeLists.txt gives this file the matching instruction set.
#define ESPALIER_CPU_NAMESPACE cpu_default
#include "espalier/ops/kernels/cpu/attention/tile_math_loops.h"
