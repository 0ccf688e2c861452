// RowMath for CpuLevel default; CMakeLists.txt gives this file the matching instruction set.
#define ESPALIER_CPU_NAMESPACE cpu_default
#include "espalier/ops/kernels/row_math_loops.h"
