// SPDX-License-Identifier: Apache-2.0
// Group sequence policy optimisation: one ratio for a whole trajectory.
//   J = min(s A, clip(s, 1 - clip_low, 1 + clip_high) A),   s = exp(mean of log r),
// the mean over the terms of the trajectory, weighted as they are in the loss (Zheng et al., "Group sequence
// policy optimization", 2025, equations 5 and 7; A may differ from token to token, as in its section 4.3).
#pragma once

#include "espalier/objective/policy_gradient.h"

namespace espalier {

class Gspo : public PolicyGradient {
 public:
  using PolicyGradient::PolicyGradient;
  std::string_view name() const override { return "gspo"; }
  Scope scope() const override { return Scope::kTrajectory; }
  TermBytes term_bytes() const override;

 protected:
  Surrogate surrogate(const PolicyTerms& terms) const override;
  at::Tensor plain_surrogate(const at::Tensor& logprobs, const at::Tensor& log_ratio,
                             const TermTensors& terms) const override;
};

}  // namespace espalier
