// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/simpo.h"

#include <ATen/ATen.h>

namespace espalier {

at::Tensor Simpo::of_pairs(const at::Tensor& chosen, const at::Tensor& rejected) const {
  return -at::log_sigmoid(options().beta * (chosen - rejected) - options().margin);
}

at::Tensor Simpo::of_pair(const at::Tensor& chosen, const at::Tensor& rejected) const {
  const at::Tensor margin = options().beta * (chosen - rejected) - options().margin;
  return at::logaddexp(at::zeros_like(margin), -margin);  // -log sigmoid
}

}  // namespace espalier
