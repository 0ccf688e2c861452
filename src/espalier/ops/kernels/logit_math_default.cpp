// LogitMath for CpuLevel default; CMakeLists.txt gives this file the matching instruction set.
#define ESPALIER_CPU_NAMESPACE cpu_default
#include "espalier/ops/kernels/logit_math_loops.h"
