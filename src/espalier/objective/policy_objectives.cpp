// SPDX-License-Identifier: Apache-2.0
// The functions J of the objectives with advantages (policy_gradient.h).
#include <ATen/ATen.h>

#include "espalier/objective/policy_gradient.h"

namespace espalier {
namespace {

/// The clipped policy gradient of PPO and its successors.
///   J = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)    (Schulman et al., PPO, 2017, equation 7),
/// and with dual_clip d, where A < 0, max(J, d A)            (Ye et al., "Mastering complex control", 2020,
///                                                            equation 4).
/// `grpo` is the same with advantages from groups (DeepSeekMath, 2024, equation 3, whose normaliser is
/// `sequence`); `dr_grpo` does not divide by deviations and lengths (Liu et al., "Understanding R1-Zero-like
/// training", 2025, section 3.2); `dapo` has a larger upper than lower clip range and averages over all
/// tokens (Yu et al., 2025, equation 8). default_options sets these differences.
class Grpo : public PolicyGradient {
 public:
  using PolicyGradient::PolicyGradient;

 protected:
  Surrogate surrogate(const PolicyTerms& terms) const override {
    return clipped_surrogate(terms, terms.log_ratio);
  }

  at::Tensor plain_surrogate(const at::Tensor&, const at::Tensor& log_ratio,
                             const TermTensors& terms) const override {
    return plain_clipped_surrogate(terms.columns[0], log_ratio);
  }
};

/// Group sequence policy optimisation: one ratio for a whole trajectory.
///   J = min(s A, clip(s, 1 - clip_low, 1 + clip_high) A),   s = exp(mean of log r),
/// the mean over the terms of the trajectory, weighted as they are in the loss (Zheng et al., "Group sequence
/// policy optimization", 2025, equations 5 and 7; A may differ from token to token, as in its section 4.3).
class Gspo : public PolicyGradient {
 public:
  using PolicyGradient::PolicyGradient;
  Scope scope() const override { return Scope::kTrajectory; }
  TermBytes term_bytes() const override {
    TermBytes bytes = PolicyGradient::term_bytes();
    bytes.graph += kTermIndexBytes + kTermRealBytes;  // the trajectory of a term, and its share
    bytes.running += kTermRealBytes;
    return bytes;
  }

 protected:
  Surrogate surrogate(const PolicyTerms& terms) const override {
    // Every trajectory in `units` has terms, so no weight that is read is 0.
    const at::Tensor& trajectory = terms.units.trajectory;
    const at::Tensor weights = sum_by_trajectory(terms.coefficient, terms.units);
    const at::Tensor shares = terms.coefficient / weights.index_select(0, trajectory);
    const at::Tensor mean = sum_by_trajectory(shares * terms.log_ratio, terms.units);
    return clipped_surrogate(terms, mean.index_select(0, trajectory));
  }

  at::Tensor plain_surrogate(const at::Tensor&, const at::Tensor& log_ratio,
                             const TermTensors& terms) const override {
    const at::Tensor shares = terms.coefficient / terms.coefficient.sum();
    return plain_clipped_surrogate(terms.columns[0], (shares * log_ratio).sum());
  }
};

/// Clipped importance sampling: the ratio is a clipped, detached weight, so every term keeps its gradient.
///   J = stopgrad(clip(r, 1 - clip_low, 1 + clip_high)) A log p
/// (MiniMax, "MiniMax-M1", 2025, equations 4 and 5; it has no lower bound, which is clip_low 1).
class Cispo : public PolicyGradient {
 public:
  using PolicyGradient::PolicyGradient;

 protected:
  Surrogate surrogate(const PolicyTerms& terms) const override {
    const at::Tensor ratio = terms.log_ratio.detach().exp();
    const at::Tensor weight = ratio.clamp(1 - options().clip_low, 1 + options().clip_high);
    return {.value = terms.coefficient * weight * terms.advantage * terms.logprobs,
            .ratio = ratio,
            .is_clipped = weight.ne(ratio)};
  }

  at::Tensor plain_surrogate(const at::Tensor& logprobs, const at::Tensor& log_ratio,
                             const TermTensors& terms) const override {
    const at::Tensor ratio = at::exp(log_ratio.detach());
    const at::Tensor at_most = at::minimum(ratio, at::full_like(ratio, 1 + options().clip_high));
    const at::Tensor weight = at::maximum(at_most, at::full_like(ratio, 1 - options().clip_low));
    return weight * terms.columns[0] * logprobs;
  }
};

/// The plain policy gradient.
///   J = A log p    (Williams, "Simple statistical gradient-following algorithms", 1992, equation 4)
/// By default A is the reward minus the mean of the other rewards of its group (Ahmadian et al., "Back to
/// basics", 2024, equation 8: RLOO), and the loss is the mean over trajectories of the sum over their tokens.
/// Importance weights correct for samples of another policy; without them the data's log-probabilities are
/// metrics only.
class Reinforce : public PolicyGradient {
 public:
  using PolicyGradient::PolicyGradient;

 protected:
  Surrogate surrogate(const PolicyTerms& terms) const override {
    return {.value = terms.coefficient * terms.advantage * terms.logprobs,
            .ratio = terms.log_ratio.detach().exp(),
            .is_clipped = {}};
  }

  at::Tensor plain_surrogate(const at::Tensor& logprobs, const at::Tensor&,
                             const TermTensors& terms) const override {
    return logprobs * terms.columns[0];
  }
};

}  // namespace

std::shared_ptr<const Objective> make_policy_gradient(const ObjectiveOptions& options) {
  switch (options.kind) {
    case ObjectiveKind::kPpo:
    case ObjectiveKind::kGrpo:
    case ObjectiveKind::kDrGrpo:
    case ObjectiveKind::kDapo:
      return std::make_shared<Grpo>(options);
    case ObjectiveKind::kGspo:
      return std::make_shared<Gspo>(options);
    case ObjectiveKind::kCispo:
      return std::make_shared<Cispo>(options);
    case ObjectiveKind::kReinforce:
      return std::make_shared<Reinforce>(options);
    default:
      return nullptr;
  }
}

}  // namespace espalier
