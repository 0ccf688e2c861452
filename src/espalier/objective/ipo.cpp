// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/ipo.h"

#include <ATen/ATen.h>

namespace espalier {

at::Tensor Ipo::of_pairs(const at::Tensor& chosen, const at::Tensor& rejected) const {
  return (chosen - rejected - 1 / (2 * options().beta)).square();
}

at::Tensor Ipo::of_pair(const at::Tensor& chosen, const at::Tensor& rejected) const {
  return at::pow((chosen - rejected) - 0.5 / options().beta, 2);
}

}  // namespace espalier
