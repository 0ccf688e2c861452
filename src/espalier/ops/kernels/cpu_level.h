// Which vector instructions the CPU kernels use.
#pragma once

namespace espalier {

/// kDefault is what the compiler may assume of every machine of the architecture; every level has what those
/// before it have. kAmx differs from kAvx512 in how bfloat16 matrices are multiplied.
enum class CpuLevel { kDefault, kAvx2, kAvx512, kAmx };

/// The best level of this machine, or the one that the environment variable ESPALIER_CPU names: default,
/// avx2, avx512 or amx; read at each call. Throws InputError where the name is unknown or the machine lacks
/// the level.
CpuLevel cpu_level();

}  // namespace espalier
