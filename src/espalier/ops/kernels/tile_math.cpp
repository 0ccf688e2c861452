#include "espalier/ops/kernels/tile_math.h"

namespace espalier {

#define ESPALIER_DECLARE_LEVEL(name)   \
  namespace name {                     \
  template <class Scalar>              \
  const TileMath<Scalar>& tile_math(); \
  const BFloat16Math& bfloat16_math(); \
  }
ESPALIER_DECLARE_LEVEL(cpu_default)
#ifdef ESPALIER_X86
ESPALIER_DECLARE_LEVEL(cpu_avx2)
ESPALIER_DECLARE_LEVEL(cpu_avx512)
#endif
#undef ESPALIER_DECLARE_LEVEL

template <class Scalar>
const TileMath<Scalar>& tile_math(CpuLevel level) {
#ifdef ESPALIER_X86
  if (level >= CpuLevel::kAvx512) return cpu_avx512::tile_math<Scalar>();
  if (level >= CpuLevel::kAvx2) return cpu_avx2::tile_math<Scalar>();
#endif
  static_cast<void>(level);
  return cpu_default::tile_math<Scalar>();
}

template const TileMath<float>& tile_math<float>(CpuLevel);
template const TileMath<double>& tile_math<double>(CpuLevel);

const BFloat16Math& bfloat16_math(CpuLevel level) {
#ifdef ESPALIER_X86
  if (level >= CpuLevel::kAvx512) return cpu_avx512::bfloat16_math();
  if (level >= CpuLevel::kAvx2) return cpu_avx2::bfloat16_math();
#endif
  static_cast<void>(level);
  return cpu_default::bfloat16_math();
}

}  // namespace espalier
