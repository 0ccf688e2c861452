// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/orpo.h"

#include <ATen/ATen.h>

namespace espalier {

at::Tensor Orpo::pair_losses(const at::Tensor& chosen, const at::Tensor& rejected) const {
  // log odds(s) = s - log(1 - exp(s))
  const at::Tensor log_odds_ratio =
      (chosen - rejected) - ((-at::expm1(chosen)).log() - (-at::expm1(rejected)).log());
  return -options().beta * at::log_sigmoid(log_odds_ratio) - chosen;
}

at::Tensor Orpo::plain_pair_loss(const at::Tensor& chosen, const at::Tensor& rejected) const {
  const auto odds = [](const at::Tensor& score) { return at::exp(score) / -at::expm1(score); };
  const at::Tensor log_ratio = at::log(odds(chosen) / odds(rejected));
  return options().beta * at::logaddexp(at::zeros_like(log_ratio), -log_ratio) - chosen;
}

}  // namespace espalier
