// SPDX-License-Identifier: Apache-2.0
// On-policy distillation: the student's own samples, scored by a teacher.
//   loss = sum over the terms of coefficient * -r A,   A = stopgrad(log q - log p),   r = exp(log p - log mu)
// log q is the teacher's log-probability of the token (field `ref_logprobs`) and log mu that of the policy
// that sampled it (`logprobs`), or stopgrad(log p) where the data have none. The gradient is that of the
// reverse divergence KL(p | q), estimated from samples, token by token (Agarwal et al., "On-policy
// distillation of language models", 2023, section 3; Lu et al., "On-policy distillation", Thinking Machines
// Lab, 2025, whose advantage is A).
#pragma once

#include "espalier/objective/objective.h"

namespace espalier {

/// Metrics: reverse_kl (mean of log p - log q), ratio_mean, ratio_min, ratio_max, mismatch_kl (as of
/// PolicyGradient).
class Opd : public Objective {
 public:
  using Objective::Objective;
  std::string_view name() const override { return "opd"; }
  std::vector<TermColumn> columns() const override;
  std::vector<Metric> metrics() const override;
  ObjectiveValue value(const at::Tensor& logprobs, const TermTensors& terms,
                       const TermUnits& units) const override;
  at::Tensor reference(std::span<const ReferenceTrajectory> group) const override;
  TermBytes term_bytes() const override;
};

}  // namespace espalier
