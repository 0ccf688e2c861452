// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/dpo.h"

#include <ATen/ATen.h>

namespace espalier {

at::Tensor Dpo::of_pairs(const at::Tensor& chosen, const at::Tensor& rejected) const {
  return -at::log_sigmoid(options().beta * (chosen - rejected));
}

at::Tensor Dpo::of_pair(const at::Tensor& chosen, const at::Tensor& rejected) const {
  const at::Tensor margin = options().beta * chosen - options().beta * rejected;
  return at::logaddexp(at::zeros_like(margin), -margin);  // -log sigmoid
}

}  // namespace espalier
