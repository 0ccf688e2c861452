#include "espalier/ops/kernels/logit_math.h"

#include "espalier/ops/kernels/level_dispatch.h"

namespace espalier {

ESPALIER_DECLARE_LEVELS(template <class Scalar> const LogitMath<Scalar>& logit_math())

template <class Scalar>
const LogitMath<Scalar>& logit_math(CpuLevel level) {
  return ESPALIER_OF_LEVEL(level, logit_math<Scalar>());
}

template const LogitMath<float>& logit_math<float>(CpuLevel);
template const LogitMath<double>& logit_math<double>(CpuLevel);

}  // namespace espalier
