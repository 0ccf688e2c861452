// SPDX-License-Identifier: Apache-2.0
// Direct preference optimisation.
//   l = -log sigmoid(beta (C - R)),   scores: sums of log p - log p_ref
// (Rafailov et al., "Direct preference optimization", 2023, equation 7).
#pragma once

#include "espalier/objective/preference.h"

namespace espalier {

class Dpo : public Preference {
 public:
  using Preference::Preference;
  std::string_view name() const override { return "dpo"; }

 protected:
  bool has_reference() const override { return true; }
  at::Tensor pair_losses(const at::Tensor& chosen, const at::Tensor& rejected) const override;
  at::Tensor plain_pair_loss(const at::Tensor& chosen, const at::Tensor& rejected) const override;
};

}  // namespace espalier
