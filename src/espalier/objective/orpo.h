// SPDX-License-Identifier: Apache-2.0
// Odds ratio preference optimisation, without a reference model: cross-entropy of the chosen trajectory and
// the odds of it against the rejected one.
//   l = -C - beta log sigmoid(log(odds(C) / odds(R))),   odds(s) = exp(s) / (1 - exp(s)),
// scores: means of log p over the tokens (Hong et al., "ORPO", 2024, equations 4 to 7, whose lambda is beta).
#pragma once

#include "espalier/objective/preference.h"

namespace espalier {

class Orpo : public Preference {
 public:
  using Preference::Preference;
  std::string_view name() const override { return "orpo"; }

 protected:
  bool averages() const override { return true; }
  at::Tensor pair_losses(const at::Tensor& chosen, const at::Tensor& rejected) const override;
  at::Tensor plain_pair_loss(const at::Tensor& chosen, const at::Tensor& rejected) const override;
};

}  // namespace espalier
