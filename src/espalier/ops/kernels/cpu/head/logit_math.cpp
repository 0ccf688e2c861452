// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cpu/head/logit_math.h"

#include "espalier/ops/kernels/cpu/isa_dispatch.h"

namespace espalier {

ESPALIER_DECLARE_ISAS(template <class Scalar> const LogitMath<Scalar>& logit_math())

template <class Scalar>
const LogitMath<Scalar>& logit_math(InstructionSet isa) {
  return ESPALIER_OF_ISA(isa, logit_math<Scalar>());
}

template const LogitMath<float>& logit_math<float>(InstructionSet);
template const LogitMath<double>& logit_math<double>(InstructionSet);

}  // namespace espalier
