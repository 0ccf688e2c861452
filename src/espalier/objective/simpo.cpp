// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/simpo.h"

#include <ATen/ATen.h>

namespace espalier {

at::Tensor Simpo::pair_losses(const at::Tensor& chosen, const at::Tensor& rejected) const {
  return -at::log_sigmoid(options().beta * (chosen - rejected) - options().margin);
}

at::Tensor Simpo::plain_pair_loss(const at::Tensor& chosen, const at::Tensor& rejected) const {
  const at::Tensor margin = options().beta * (chosen - rejected) - options().margin;
  return at::logaddexp(at::zeros_like(margin), -margin);  // -log sigmoid
}

}  // namespace espalier
