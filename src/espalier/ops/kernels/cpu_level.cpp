#include "espalier/ops/kernels/cpu_level.h"

#include <cstdlib>
#include <string_view>

#include "espalier/base/check.h"

namespace espalier {
namespace {

bool has_avx2() {
#ifdef ESPALIER_X86
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

bool has_avx512() {
#ifdef ESPALIER_X86
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

}  // namespace

CpuLevel cpu_level() {
  const char* name = std::getenv("ESPALIER_CPU");
  if (name == nullptr || *name == '\0') {
    return has_avx512() ? CpuLevel::kAvx512 : has_avx2() ? CpuLevel::kAvx2 : CpuLevel::kDefault;
  }
  const std::string_view level = name;
  ESPALIER_CHECK(level == "default" || level == "avx2" || level == "avx512",
                 "ESPALIER_CPU: expected default, avx2 or avx512, received {}", level);
  if (level == "default") return CpuLevel::kDefault;
  ESPALIER_CHECK(level == "avx2" ? has_avx2() : has_avx512(),
                 "ESPALIER_CPU: expected a level that this machine has, received {}", level);
  return level == "avx2" ? CpuLevel::kAvx2 : CpuLevel::kAvx512;
}

}  // namespace espalier
