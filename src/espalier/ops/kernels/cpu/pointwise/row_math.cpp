// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cpu/pointwise/row_math.h"

namespace espalier {

template <class Scalar>
void add_partials(const Scalar* partials, int64_t num_partials, int64_t width, double* sum) {
  for (int64_t b = 0; b < num_partials; ++b) {
    for (int64_t i = 0; i < width; ++i) sum[i] += partials[b * width + i];
  }
}

template void add_partials<double>(const double*, int64_t, int64_t, double*);
template void add_partials<float>(const float*, int64_t, int64_t, double*);

}  // namespace espalier
