#include "espalier/ops/kernels/tile_math.h"

#include "espalier/ops/kernels/level_dispatch.h"

namespace espalier {

ESPALIER_DECLARE_LEVELS(template <class Scalar> const TileMath<Scalar>& tile_math())
ESPALIER_DECLARE_LEVELS(const BFloat16Math& bfloat16_math())

template <class Scalar>
const TileMath<Scalar>& tile_math(CpuLevel level) {
  return ESPALIER_OF_LEVEL(level, tile_math<Scalar>());
}

template const TileMath<float>& tile_math<float>(CpuLevel);
template const TileMath<double>& tile_math<double>(CpuLevel);

const BFloat16Math& bfloat16_math(CpuLevel level) {
  return ESPALIER_OF_LEVEL(level, bfloat16_math());
}

}  // namespace espalier
