// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/global_norm.h"

#include <ATen/ATen.h>

#include <cmath>

namespace espalier {

double global_norm(std::vector<at::Tensor> gradients) {
  std::erase_if(gradients, [](const at::Tensor& gradient) { return !gradient.defined(); });
  if (gradients.empty()) return 0;
  const at::Tensor norms = at::stack(at::_foreach_norm(gradients, 2, at::kDouble)).cpu();
  double squares = 0;
  for (int64_t i = 0; i < norms.numel(); ++i) {
    const double norm = norms.const_data_ptr<double>()[i];
    squares += norm * norm;
  }
  return std::sqrt(squares);
}

}  // namespace espalier
