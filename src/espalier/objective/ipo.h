// SPDX-License-Identifier: Apache-2.0
// Identity preference optimisation.
//   l = (C - R - 1 / (2 beta))^2,   scores: means of log p - log p_ref over the tokens
// (Azar et al., "A general theoretical paradigm to understand learning from human preferences", 2023,
// equation 17, whose tau is beta). The equation has sums. TRL uses means, as the authors did, so that the
// target margin per token does not depend on length.
#pragma once

#include "espalier/objective/preference.h"

namespace espalier {

class Ipo : public Preference {
 public:
  using Preference::Preference;
  std::string_view name() const override { return "ipo"; }

 protected:
  bool has_reference() const override { return true; }
  bool averages() const override { return true; }
  at::Tensor pair_losses(const at::Tensor& chosen, const at::Tensor& rejected) const override;
  at::Tensor plain_pair_loss(const at::Tensor& chosen, const at::Tensor& rejected) const override;
};

}  // namespace espalier
