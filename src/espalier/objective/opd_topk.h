// SPDX-License-Identifier: Apache-2.0
// On-policy distillation over the most likely tokens of the teacher.
//   loss = sum over the terms of coefficient * D
// D is the reverse divergence of the student p from the teacher q at the term's position, restricted to the
// teacher's K most likely tokens v in S (fields `ref_topk_ids`, `ref_topk_logprobs`):
//   rest:         D = sum over S of p log(p / q) + (1 - P) log((1 - P) / (1 - Q))
//   renormalize:  D = sum over S of p' log(p' / q'),  p' = p / P,  q' = q / Q
// with P and Q the sums of p and q over S.
// Over all of the vocabulary both are KL(p | q), the divergence of "Generalized knowledge distillation"
// (Agarwal et al., "On-policy distillation of language models", 2023, section 3, algorithm 1 with reverse KL
// on samples of the student, through which no gradient flows). With `rest` all other tokens are merged into
// one, so that D <= KL(p | q) (the log-sum inequality: Cover and Thomas, "Elements of information theory",
// theorem 2.7.1) and probability mass of the student outside of S is penalised; with `renormalize` it is not.
// 1 - P and 1 - Q are clamped to at least 1e-8: below that they are float32 rounding.
//
// D does not depend on the sampled token, so it needs no importance ratio.
#pragma once

#include "espalier/objective/objective.h"

namespace espalier {

/// Metrics: reverse_kl (mean of D), topk_mass (mean of P).
class OpdTopk : public Objective {
 public:
  using Objective::Objective;
  std::string_view name() const override { return "opd"; }
  std::vector<Metric> metrics() const override;
  ObjectiveValue value(const at::Tensor& logprobs, const TermTensors& terms,
                       const TermUnits& units) const override;
  at::Tensor reference(std::span<const ReferenceTrajectory> group) const override;
  TermBytes term_bytes() const override;
};

}  // namespace espalier
