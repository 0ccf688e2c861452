// SPDX-License-Identifier: Apache-2.0
// The losses l of the objectives that compare pairs (preference.h).
#include <ATen/ATen.h>

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

/// Odds ratio preference optimisation, without a reference model: cross-entropy of the chosen trajectory and
/// the odds of it against the rejected one.
///   l = -C - beta log sigmoid(log(odds(C) / odds(R))),   odds(s) = exp(s) / (1 - exp(s)),
/// scores: means of log p over the tokens (Hong et al., "ORPO", 2024, equations 4 to 7, whose lambda is
/// beta).
class Orpo : public Preference {
 public:
  using Preference::Preference;

 protected:
  bool averages() const override { return true; }

  at::Tensor pair_losses(const at::Tensor& chosen, const at::Tensor& rejected) const override {
    // log odds(s) = s - log(1 - exp(s))
    const at::Tensor log_odds_ratio =
        (chosen - rejected) - ((-at::expm1(chosen)).log() - (-at::expm1(rejected)).log());
    return -options().beta * at::log_sigmoid(log_odds_ratio) - chosen;
  }

  at::Tensor plain_pair_loss(const at::Tensor& chosen, const at::Tensor& rejected) const override {
    const auto odds = [](const at::Tensor& score) { return at::exp(score) / -at::expm1(score); };
    const at::Tensor log_ratio = at::log(odds(chosen) / odds(rejected));
    return options().beta * at::logaddexp(at::zeros_like(log_ratio), -log_ratio) - chosen;
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
