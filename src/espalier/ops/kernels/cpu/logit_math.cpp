// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cpu/logit_math.h"

#include "espalier/ops/kernels/cpu/level_dispatch.h"

namespace espalier {

ESPALIER_DECLARE_LEVELS(template <class Scalar> const LogitMath<Scalar>& logit_math())

template <class Scalar>
const LogitMath<Scalar>& logit_math(InstructionSet level) {
  return ESPALIER_OF_LEVEL(level, logit_math<Scalar>());
}

template const LogitMath<float>& logit_math<float>(InstructionSet);
template const LogitMath<double>& logit_math<double>(InstructionSet);

}  // namespace espalier
