// SPDX-License-Identifier: Apache-2.0
// The losses l of the objectives that compare pairs (preference.h).
#include <ATen/ATen.h>

#include <cmath>

#include "espalier/objective/exponentials.h"
#include "espalier/objective/preference.h"

namespace espalier {
namespace {

/// Direct preference optimisation.
///   l = -log sigmoid(beta (C - R)),   scores: sums of log p - log p_ref
/// (Rafailov et al., "Direct preference optimization", 2023, equation 7).
class Dpo : public Preference {
 public:
  using Preference::Preference;

 protected:
  bool has_reference() const override { return true; }

  at::Tensor pair_losses(const at::Tensor& chosen, const at::Tensor& rejected) const override {
    return -at::log_sigmoid(options().beta * (chosen - rejected));
  }

  at::Tensor plain_pair_loss(const at::Tensor& chosen, const at::Tensor& rejected) const override {
    const at::Tensor margin = options().beta * chosen - options().beta * rejected;
    return at::logaddexp(at::zeros_like(margin), -margin);  // -log sigmoid
  }
};

/// Identity preference optimisation.
///   l = (C - R - 1 / (2 beta))^2,   scores: means of log p - log p_ref over the tokens
/// (Azar et al., "A general theoretical paradigm to understand learning from human preferences", 2023,
/// equation 17, whose tau is beta). The equation has sums. TRL uses means, as the authors did, so that the
/// target margin per token does not depend on length.
class Ipo : public Preference {
 public:
  using Preference::Preference;

 protected:
  bool has_reference() const override { return true; }
  bool averages() const override { return true; }

  at::Tensor pair_losses(const at::Tensor& chosen, const at::Tensor& rejected) const override {
    return (chosen - rejected - 1 / (2 * options().beta)).square();
  }

  at::Tensor plain_pair_loss(const at::Tensor& chosen, const at::Tensor& rejected) const override {
    return at::pow((chosen - rejected) - 0.5 / options().beta, 2);
  }
};

/// Simple preference optimisation, without a reference model.
///   l = -log sigmoid(beta (C - R) - margin),   scores: means of log p over the tokens
/// (Meng et al., "SimPO", 2024, equation 6).
class Simpo : public Preference {
 public:
  using Preference::Preference;

 protected:
  bool averages() const override { return true; }

  at::Tensor pair_losses(const at::Tensor& chosen, const at::Tensor& rejected) const override {
    return -at::log_sigmoid(options().beta * (chosen - rejected) - options().margin);
  }

  at::Tensor plain_pair_loss(const at::Tensor& chosen, const at::Tensor& rejected) const override {
    const at::Tensor margin = options().beta * (chosen - rejected) - options().margin;
    return at::logaddexp(at::zeros_like(margin), -margin);  // -log sigmoid
  }
};

// Half the distance from 1 to the float32 below it: 1 - exp(score) under this is rounding there.
constexpr double kLeastRejectedRest = 0x1p-25;

/// Odds ratio preference optimisation, without a reference model: cross-entropy of the chosen trajectory and
/// the odds of it against the rejected one.
///   l = -C - beta log sigmoid(log(odds(C) / odds(R))),   odds(s) = exp(s) / (1 - exp(s)),
/// scores: means of log p over the tokens (Hong et al., "ORPO", 2024, equations 4 to 7, whose lambda is
/// beta). The loss is finite where the chosen trajectory is certain (C = 0). It is infinite where the
/// rejected one is, so log(1 - exp(R)) continues below kLeastRejectedRest along its tangent (docs/math.md,
/// "Objectives where a probability is 0 or 1"). Scores above 0 are rounding and count as 0.
class Orpo : public Preference {
 public:
  using Preference::Preference;

 protected:
  bool averages() const override { return true; }

  at::Tensor pair_losses(const at::Tensor& chosen, const at::Tensor& rejected) const override {
    const double beta = options().beta;
    const at::Tensor c = chosen.detach().clamp_max(0), r = rejected.detach().clamp_max(0);
    const at::Tensor chosen_rest = -at::expm1(c), rejected_rest = -at::expm1(r);  // 1 - exp(score)
    const at::Tensor divisor = rejected_rest.clamp_min(kLeastRejectedRest);
    const at::Tensor log_rest = divisor.log() + (rejected_rest - divisor) / kLeastRejectedRest;
    const at::Tensor log_odds_ratio = (c - r) - (chosen_rest.log() - log_rest);
    // Autograd would multiply 0 by the infinite derivative of the logarithm of chosen_rest.
    const at::Tensor denominator = chosen_rest + (c - r + log_rest).exp();
    const at::Tensor chosen_slope = -beta / denominator;
    const at::Tensor rejected_slope = beta * (chosen_rest / denominator) * (1 + r.exp() / divisor);
    return with_slope(-beta * at::log_sigmoid(log_odds_ratio), chosen_slope, chosen) +
           with_slope(at::zeros_like(rejected_slope), rejected_slope, rejected) - chosen;
  }

  at::Tensor plain_pair_loss(const at::Tensor& chosen, const at::Tensor& rejected) const override {
    const at::Tensor c = chosen - at::relu(chosen).detach(), r = rejected - at::relu(rejected).detach();
    const at::Tensor rest = -at::expm1(r),
                     tangent = rest / kLeastRejectedRest + (std::log(kLeastRejectedRest) - 1);
    const at::Tensor log_rest = rest.item<double>() < kLeastRejectedRest ? tangent : rest.log();
    // log(1 + odds(R) / odds(C)), of which exp(C), exp(R) or both may be 0
    const at::Tensor larger = at::maximum(c, r).detach();
    const at::Tensor sum = (c - larger + log_rest).exp() - at::expm1(c) * (r - larger).exp();
    return options().beta * (sum.log() + larger - c - log_rest) - chosen;
  }
};

}  // namespace

std::shared_ptr<const Objective> make_preference(const ObjectiveOptions& options) {
  switch (options.kind) {
    case ObjectiveKind::kDpo:
      return std::make_shared<Dpo>(options);
    case ObjectiveKind::kIpo:
      return std::make_shared<Ipo>(options);
    case ObjectiveKind::kSimpo:
      return std::make_shared<Simpo>(options);
    case ObjectiveKind::kOrpo:
      return std::make_shared<Orpo>(options);
    default:
      return nullptr;
  }
}

}  // namespace espalier
