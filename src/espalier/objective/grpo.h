// SPDX-License-Identifier: Apache-2.0
// The clipped policy gradient of PPO and its successors.
//   J = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)    (Schulman et al., PPO, 2017, equation 7),
// and with dual_clip d, where A < 0, max(J, d A)            (Ye et al., "Mastering complex control", 2020,
//                                                            equation 4).
// `grpo` is the same with advantages from groups (DeepSeekMath, 2024, equation 3, whose normaliser is
// `sequence`); `dr_grpo` does not divide by deviations and lengths (Liu et al., "Understanding R1-Zero-like
// training", 2025, section 3.2); `dapo` has a larger upper than lower clip range and averages over all tokens
// (Yu et al., 2025, equation 8). default_options sets these differences.
#pragma once

#include "espalier/objective/policy_gradient.h"

namespace espalier {

class Grpo : public PolicyGradient {
 public:
  using PolicyGradient::PolicyGradient;
  std::string_view name() const override { return to_string(options().kind); }

 protected:
  Surrogate surrogate(const PolicyTerms& terms) const override;
  at::Tensor plain_surrogate(const at::Tensor& logprobs, const at::Tensor& log_ratio,
                             const TermTensors& terms) const override;
};

}  // namespace espalier
