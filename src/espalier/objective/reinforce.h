// SPDX-License-Identifier: Apache-2.0
// The plain policy gradient.
//   J = A log p    (Williams, "Simple statistical gradient-following algorithms", 1992, equation 4)
// By default A is the reward minus the mean of the other rewards of its group (Ahmadian et al., "Back to
// basics", 2024, equation 8: RLOO), and the loss is the mean over trajectories of the sum over their tokens.
// Importance weights correct for samples of another policy; without them the data's log-probabilities are
// metrics only.
#pragma once

#include "espalier/objective/policy_gradient.h"

namespace espalier {

class Reinforce : public PolicyGradient {
 public:
  using PolicyGradient::PolicyGradient;
  std::string_view name() const override { return "reinforce"; }

 protected:
  Surrogate surrogate(const PolicyTerms& terms) const override;
  at::Tensor plain_surrogate(const at::Tensor& logprobs, const at::Tensor& log_ratio,
                             const TermTensors& terms) const override;
};

}  // namespace espalier
