// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/ipo.h"

#include <ATen/ATen.h>

namespace espalier {

at::Tensor Ipo::pair_losses(const at::Tensor& chosen, const at::Tensor& rejected) const {
  return (chosen - rejected - 1 / (2 * options().beta)).square();
}

at::Tensor Ipo::plain_pair_loss(const at::Tensor& chosen, const at::Tensor& rejected) const {
  return at::pow((chosen - rejected) - 0.5 / options().beta, 2);
}

}  // namespace espalier
