// SPDX-License-Identifier: Apache-2.0
// Clipped importance sampling: the ratio is a clipped, detached weight, so every term keeps its gradient.
//   J = stopgrad(clip(r, 1 - clip_low, 1 + clip_high)) A log p
// (MiniMax, "MiniMax-M1", 2025, equations 4 and 5; it has no lower bound, which is clip_low 1).
#pragma once

#include "espalier/objective/policy_gradient.h"

namespace espalier {

class Cispo : public PolicyGradient {
 public:
  using PolicyGradient::PolicyGradient;
  std::string_view name() const override { return "cispo"; }

 protected:
  Surrogate surrogate(const PolicyTerms& terms) const override;
  at::Tensor plain_surrogate(const at::Tensor& logprobs, const at::Tensor& log_ratio,
                             const TermTensors& terms) const override;
};

}  // namespace espalier
