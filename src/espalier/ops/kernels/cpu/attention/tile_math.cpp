// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cpu/attention/tile_math.h"

#include "espalier/ops/kernels/cpu/isa_dispatch.h"

namespace espalier {

ESPALIER_DECLARE_ISAS(template <class Scalar> const TileMath<Scalar>& tile_math())
ESPALIER_DECLARE_ISAS(const BFloat16Math& bfloat16_math())

template <class Scalar>
const TileMath<Scalar>& tile_math(InstructionSet isa) {
  return ESPALIER_OF_ISA(isa, tile_math<Scalar>());
}

template const TileMath<float>& tile_math<float>(InstructionSet);
template const TileMath<double>& tile_math<double>(InstructionSet);

const BFloat16Math& bfloat16_math(InstructionSet isa) {
  return ESPALIER_OF_ISA(isa, bfloat16_math());
}

}  // namespace espalier
