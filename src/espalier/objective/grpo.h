// SPDX-License-Identifier: Apache-2.0
// The clipped policy gradient of PPO and GRPO.
//   loss = sum over the terms of coefficient * -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A),
//   r = exp(log p - old log p), the old one being stopgrad(log p) where the data have none
//   (Schulman et al., PPO, 2017, equation 7).
#pragma once

#include "espalier/objective/objective.h"

namespace espalier {

/// Metrics: clip_fraction (terms whose clipped side is the smaller one), ratio_mean, mismatch_kl (r - 1 -
/// log r, Schulman's k3).
class Grpo : public Objective {
 public:
  using Objective::Objective;
  std::string_view name() const override { return "grpo"; }
  std::vector<TermColumn> columns() const override;
  std::vector<std::string> metrics() const override;
  ObjectiveValue value(const at::Tensor& logprobs, const TermTensors& terms,
                       const TermUnits& units) const override;
  at::Tensor reference(std::span<const ReferenceTrajectory> group) const override;
  TermBytes term_bytes() const override;
};

}  // namespace espalier
