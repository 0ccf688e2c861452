// SPDX-License-Identifier: Apache-2.0
// Base of objectives with advantages: the ratio to the behaviour policy, importance weights, the divergence
// from a reference model, metrics.
//   loss = sum over the terms of coefficient * (-w J + kl_coef * kl)
// with J of the objective, as a function of the ratio r = exp(log p - log mu) and the advantage A. log mu is
// the data's log-probability under the behaviour policy, or stopgrad(log p) if the data have none.
//
// w = 1 without importance weights. With them, r = exp(log p - stopgrad(log p)), which is 1 and has the
// gradient of log p, and the ratio to mu becomes a detached weight, of the term or (level sequence) the
// product over the terms of its trajectory:
//   truncate:  w = min(stopgrad(p / mu), importance_cap) (Espeholt et al., IMPALA, 2018, section 4.1; Yao et
//              al., "Your efficient RL framework secretly brings you off-policy RL training", 2025)
//   mask:      w = stopgrad(p / mu) inside [importance_floor, importance_cap], else 0 (IcePop: Ling team,
//              "Every step evolves", 2025, section 3.2)
// kl is kl_estimate of log p - log p_ref (GRPO: DeepSeekMath, 2024, equation 4, is k3), absent unless
// has_kl_in(kLoss).
#pragma once

#include "espalier/objective/objective.h"

namespace espalier {

/// The inputs of an objective's J; [M] each, float64. log_ratio = log r.
struct PolicyTerms {
  const at::Tensor& logprobs;
  const at::Tensor& log_ratio;
  const at::Tensor& advantage;
  const at::Tensor& coefficient;
  const TermUnits& units;  // empty unless the scope is wider than a token
};

/// Metrics: clip_fraction (terms whose ratio was clipped, of objectives that clip), ratio_mean, ratio_min,
/// ratio_max (of the ratio that the objective clips), mismatch_kl (k3 of log mu - log p, the divergence of
/// the behaviour policy from this one); importance_mean and importance_clipped (weights that were truncated
/// or masked) with importance weights; ref_kl with a divergence in the loss.
class PolicyGradient : public Objective {
 public:
  using Objective::Objective;
  Scope scope() const override;
  std::vector<TermColumn> columns() const final;
  std::vector<Metric> metrics() const final;
  ObjectiveValue value(const at::Tensor& logprobs, const TermTensors& terms,
                       const TermUnits& units) const final;
  at::Tensor reference(std::span<const ReferenceTrajectory> group) const final;
  TermBytes term_bytes() const override;

 protected:
  struct Surrogate {
    at::Tensor value;       // coefficient * J, differentiable
    at::Tensor ratio;       // before clipping, detached
    at::Tensor is_clipped;  // bool; undefined if the objective does not clip
  };
  virtual Surrogate surrogate(const PolicyTerms& terms) const = 0;

  /// The surrogate J = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), at least dual_clip A where A < 0 and
  /// dual_clip is not 0. The gradient of a clipped term is exactly 0, also where its ratio overflows.
  Surrogate clipped_surrogate(const PolicyTerms& terms, const at::Tensor& log_ratio) const;

  /// An independent implementation of its J for reference(), by bounds on log r.
  at::Tensor plain_clipped_surrogate(const at::Tensor& advantage, const at::Tensor& log_ratio) const;

  /// An independent implementation of J for the terms of one trajectory.
  virtual at::Tensor plain_surrogate(const at::Tensor& logprobs, const at::Tensor& log_ratio,
                                     const TermTensors& terms) const = 0;

 private:
  bool weighs() const { return options().importance_weights != ImportanceWeights::kNone; }

  struct Weights {
    at::Tensor values;      // detached
    at::Tensor is_changed;  // bool: truncated or masked
  };
  Weights importance_weights(const at::Tensor& log_mismatch, const TermUnits& units) const;
};

/// The objective of this kind (policy_objectives.cpp); null if it is no policy gradient.
std::shared_ptr<const Objective> make_policy_gradient(const ObjectiveOptions& options);

/// Sums values of terms [M] by trajectory: [N].
at::Tensor sum_by_trajectory(const at::Tensor& values, const TermUnits& units);

}  // namespace espalier
