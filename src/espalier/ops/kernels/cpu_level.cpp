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

bool has_amx() {
#ifdef ESPALIER_X86
  return has_avx512() && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16");
#else
  return false;
#endif
}

CpuLevel best_level() {
  if (has_amx()) return CpuLevel::kAmx;
  if (has_avx512()) return CpuLevel::kAvx512;
  return has_avx2() ? CpuLevel::kAvx2 : CpuLevel::kDefault;
}

struct NamedLevel {
  std::string_view name;
  CpuLevel level;
};

constexpr NamedLevel kLevels[] = {{"default", CpuLevel::kDefault},
                                  {"avx2", CpuLevel::kAvx2},
                                  {"avx512", CpuLevel::kAvx512},
                                  {"amx", CpuLevel::kAmx}};

}  // namespace

CpuLevel cpu_level() {
  static const CpuLevel best = best_level();
  const char* given = std::getenv("ESPALIER_CPU");
  if (given == nullptr || *given == '\0') return best;
  for (const auto& [name, level] : kLevels) {
    if (name != given) continue;
    ESPALIER_CHECK(level <= best, "ESPALIER_CPU: expected a level that this machine has, received {}", given);
    return level;
  }
  throw InputError(fmt::format("ESPALIER_CPU: expected default, avx2, avx512 or amx, received {}", given));
}

}  // namespace espalier
