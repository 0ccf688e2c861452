#include "espalier/ops/kernels/logit_math.h"

namespace espalier {

#define ESPALIER_DECLARE_LEVEL(name)     \
  namespace name {                       \
  template <class Scalar>                \
  const LogitMath<Scalar>& logit_math(); \
  }
ESPALIER_DECLARE_LEVEL(cpu_default)
#ifdef ESPALIER_X86
ESPALIER_DECLARE_LEVEL(cpu_avx2)
ESPALIER_DECLARE_LEVEL(cpu_avx512)
#endif
#undef ESPALIER_DECLARE_LEVEL

template <class Scalar>
const LogitMath<Scalar>& logit_math(CpuLevel level) {
#ifdef ESPALIER_X86
  if (level >= CpuLevel::kAvx512) return cpu_avx512::logit_math<Scalar>();
  if (level >= CpuLevel::kAvx2) return cpu_avx2::logit_math<Scalar>();
#endif
  static_cast<void>(level);
  return cpu_default::logit_math<Scalar>();
}

template const LogitMath<float>& logit_math<float>(CpuLevel);
template const LogitMath<double>& logit_math<double>(CpuLevel);

}  // namespace espalier
