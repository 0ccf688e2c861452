// SPDX-License-Identifier: Apache-2.0
// PanelMath for InstructionSet avx512; CMakeLists.txt gives this file the matching instruction set.
#define ESPALIER_CPU_NAMESPACE cpu_avx512
#include "espalier/ops/kernels/cpu/products/panel_math_loops.h"
