// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cpu/recurrence/recurrence_math.h"

#include "espalier/ops/kernels/cpu/isa_dispatch.h"

namespace espalier {

ESPALIER_DECLARE_ISAS(template <class Scalar> const RecurrenceMath<Scalar>& recurrence_math())

template <class Scalar>
const RecurrenceMath<Scalar>& recurrence_math(InstructionSet isa) {
  return ESPALIER_OF_ISA(isa, recurrence_math<Scalar>());
}

template const RecurrenceMath<double>& recurrence_math<double>(InstructionSet);
template const RecurrenceMath<float>& recurrence_math<float>(InstructionSet);

}  // namespace espalier
