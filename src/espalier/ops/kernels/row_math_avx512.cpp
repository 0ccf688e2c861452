// RowMath for CpuLevel avx512; CMakeLists.txt gives this file the matching instruction set.
#define ESPALIER_CPU_NAMESPACE cpu_avx512
#include "espalier/ops/kernels/row_math_loops.h"
