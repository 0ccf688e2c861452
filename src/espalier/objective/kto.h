// SPDX-License-Identifier: Apache-2.0
// Kahneman-Tversky optimisation: single trajectories labelled desirable or not (`chosen`), without pairs.
//   loss = sum over the trajectories of u * l,   s = sum over the terms of w (log p - log p_ref),
//   l = chosen_weight (1 - sigmoid(beta (s - z)))    of chosen trajectories,
//       rejected_weight (1 - sigmoid(beta (z - s)))  of rejected ones
// (Ethayarajh et al., "KTO", 2024, equation 8). The reference point z, an estimate of the divergence from the
// reference model, has no gradient: max(0, mean of s) over the trajectories of the step without `chosen`
// (mismatched prompt-answer pairs, as in the paper; they contribute no loss), or over all if there are none.
// The share u is coefficient / w; with the normaliser sequence-sum the loss is the mean over the trajectories
// that have `chosen`.
#pragma once

#include "espalier/objective/objective.h"

namespace espalier {

/// Metrics of the step: reference_point (z), chosen_reward and rejected_reward (means of beta s; 0 if there
/// are none).
class Kto : public Objective {
 public:
  using Objective::Objective;
  std::string_view name() const override { return "kto"; }
  Scope scope() const override { return Scope::kStep; }
  std::vector<TermColumn> columns() const override;
  std::vector<Metric> metrics() const override;
  ObjectiveValue value(const at::Tensor& logprobs, const TermTensors& terms,
                       const TermUnits& units) const override;
  at::Tensor reference(std::span<const ReferenceTrajectory> group) const override;
  TermBytes term_bytes() const override;
};

}  // namespace espalier
