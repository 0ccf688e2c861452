// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cpu/pointwise/row_math.h"

#include "espalier/ops/kernels/cpu/isa_dispatch.h"

namespace espalier {

ESPALIER_DECLARE_ISAS(template <class Element> const RowMath<Element>& row_math())

template <class Element>
const RowMath<Element>& row_math(InstructionSet isa) {
  return ESPALIER_OF_ISA(isa, row_math<Element>());
}

template const RowMath<double>& row_math<double>(InstructionSet);
template const RowMath<float>& row_math<float>(InstructionSet);
template const RowMath<BFloat16>& row_math<BFloat16>(InstructionSet);

template <class Scalar>
void add_partials(const Scalar* partials, int64_t num_partials, int64_t width, double* sum) {
  for (int64_t b = 0; b < num_partials; ++b) {
    for (int64_t i = 0; i < width; ++i) sum[i] += partials[b * width + i];
  }
}

template void add_partials<double>(const double*, int64_t, int64_t, double*);
template void add_partials<float>(const float*, int64_t, int64_t, double*);

}  // namespace espalier
