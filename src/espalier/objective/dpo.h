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
  at::Tensor of_pairs(const at::Tensor& chosen, const at::Tensor& rejected) const override;
  at::Tensor of_pair(const at::Tensor& chosen, const at::Tensor& rejected) const override;
};

}  // namespace espalier
