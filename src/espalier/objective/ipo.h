// SPDX-License-Identifier: Apache-2.0
// Identity preference optimisation.
//   l = (C - R - 1 / (2 beta))^2,   scores: means of log p - log p_ref over the tokens
// (Azar et al., "A general theoretical paradigm to understand learning from human preferences", 2023,
// equation 17, whose tau is beta). The equation has sums; means keep long answers from asking for larger
// margins per token, and are what its authors used, as TRL says.
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
  at::Tensor of_pairs(const at::Tensor& chosen, const at::Tensor& rejected) const override;
  at::Tensor of_pair(const at::Tensor& chosen, const at::Tensor& rejected) const override;
};

}  // namespace espalier
