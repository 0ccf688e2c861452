// SPDX-License-Identifier: Apache-2.0
// Simple preference optimisation, without a reference model.
//   l = -log sigmoid(beta (C - R) - margin),   scores: means of log p over the tokens
// (Meng et al., "SimPO", 2024, equation 6).
#pragma once

#include "espalier/objective/preference.h"

namespace espalier {

class Simpo : public Preference {
 public:
  using Preference::Preference;
  std::string_view name() const override { return "simpo"; }

 protected:
  bool averages() const override { return true; }
  at::Tensor pair_losses(const at::Tensor& chosen, const at::Tensor& rejected) const override;
  at::Tensor plain_pair_loss(const at::Tensor& chosen, const at::Tensor& rejected) const override;
};

}  // namespace espalier
