#include "espalier/ops/kernels/row_math.h"

namespace espalier {

#define ESPALIER_DECLARE_LEVEL(name)  \
  namespace name {                    \
  template <class Element>            \
  const RowMath<Element>& row_math(); \
  }
ESPALIER_DECLARE_LEVEL(cpu_default)
#ifdef ESPALIER_X86
ESPALIER_DECLARE_LEVEL(cpu_avx2)
ESPALIER_DECLARE_LEVEL(cpu_avx512)
#endif
#undef ESPALIER_DECLARE_LEVEL

template <class Element>
const RowMath<Element>& row_math(CpuLevel level) {
#ifdef ESPALIER_X86
  if (level >= CpuLevel::kAvx512) return cpu_avx512::row_math<Element>();
  if (level >= CpuLevel::kAvx2) return cpu_avx2::row_math<Element>();
#endif
  static_cast<void>(level);
  return cpu_default::row_math<Element>();
}

template const RowMath<double>& row_math<double>(CpuLevel);
template const RowMath<float>& row_math<float>(CpuLevel);
template const RowMath<BFloat16>& row_math<BFloat16>(CpuLevel);

template <class Scalar>
void add_partials(const Scalar* partials, int64_t num_partials, int64_t width, double* sum) {
  for (int64_t b = 0; b < num_partials; ++b) {
    for (int64_t i = 0; i < width; ++i) sum[i] += partials[b * width + i];
  }
}

template void add_partials<double>(const double*, int64_t, int64_t, double*);
template void add_partials<float>(const float*, int64_t, int64_t, double*);

}  // namespace espalier
