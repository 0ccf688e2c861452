// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/policy_gradient.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "espalier/objective/exponentials.h"

namespace espalier {
namespace {

constexpr double kUnbounded = std::numeric_limits<double>::infinity();

// The formulas of kl_estimate as printed, for reference().
at::Tensor plain_divergence(const at::Tensor& logprobs, const at::Tensor& reference, KlEstimator estimator) {
  const at::Tensor log_ratio = reference - logprobs;
  if (estimator == KlEstimator::kK1) return -log_ratio;
  if (estimator == KlEstimator::kK2) return 0.5 * log_ratio.pow(2);
  return at::exp(log_ratio) - 1 - log_ratio;
}

}  // namespace

at::Tensor sum_by_trajectory(const at::Tensor& values, const TermUnits& units) {
  return at::zeros({units.num_trajectories}, values.options()).index_add(0, units.trajectory, values);
}

Scope PolicyGradient::scope() const {
  return weighs() && options().importance_level == ImportanceLevel::kSequence ? Scope::kTrajectory
                                                                              : Scope::kToken;
}

std::vector<TermColumn> PolicyGradient::columns() const {
  std::vector<TermColumn> columns{TermColumn::kAdvantage, TermColumn::kOldLogprob};
  if (options().has_kl_in(KlPlace::kLoss)) columns.push_back(TermColumn::kRefLogprob);
  return columns;
}

std::vector<Metric> PolicyGradient::metrics() const {
  std::vector<Metric> metrics;
  if (clips_ratio(options().kind)) metrics.push_back({"clip_fraction"});
  metrics.push_back({"ratio_mean"});
  metrics.push_back({"ratio_min", Reduction::kMin});
  metrics.push_back({"ratio_max", Reduction::kMax});
  metrics.push_back({"mismatch_kl"});
  if (weighs()) {
    metrics.push_back({"importance_mean"});
    metrics.push_back({"importance_clipped"});
  }
  if (options().has_kl_in(KlPlace::kLoss)) metrics.push_back({"ref_kl"});
  return metrics;
}

PolicyGradient::Weights PolicyGradient::importance_weights(const at::Tensor& log_mismatch,
                                                           const TermUnits& units) const {
  at::Tensor log_weight = log_mismatch.detach();
  if (options().importance_level == ImportanceLevel::kSequence) {
    log_weight = sum_by_trajectory(log_weight, units).index_select(0, units.trajectory);
  }
  const at::Tensor weight = log_weight.exp();
  const at::Tensor is_above = weight.gt(options().importance_cap);
  if (options().importance_weights == ImportanceWeights::kTruncate) {
    return {weight.clamp_max(options().importance_cap), is_above};
  }
  const at::Tensor is_out = is_above.logical_or(weight.lt(options().importance_floor));
  return {weight.masked_fill(is_out, 0), is_out};
}

PolicyGradient::Surrogate PolicyGradient::clipped_surrogate(const PolicyTerms& terms,
                                                            const at::Tensor& log_ratio) const {
  const double most = options().dual_clip > 0 ? options().dual_clip : kUnbounded;
  const at::Tensor ratio = log_ratio.detach().exp();
  const at::Tensor bounded = at::where(terms.advantage.lt(0), ratio.clamp(1 - options().clip_low, most),
                                       ratio.clamp_max(1 + options().clip_high));
  const at::Tensor is_bounded = bounded.ne(ratio);
  const at::Tensor scale = terms.coefficient * terms.advantage, slope = scaled_exp(scale, log_ratio);
  const at::Tensor value = at::where(is_bounded, bounded.mul_(scale), slope);
  return {.value = with_slope(value, slope.masked_fill_(is_bounded, 0), log_ratio),
          .ratio = ratio,
          .is_clipped = is_bounded.logical_and(terms.advantage.ne(0))};
}

at::Tensor PolicyGradient::plain_clipped_surrogate(const at::Tensor& advantage,
                                                   const at::Tensor& log_ratio) const {
  at::Tensor least = at::full_like(advantage, -kUnbounded);
  at::Tensor most = at::full_like(advantage, std::log(1 + options().clip_high));
  const at::Tensor is_negative = advantage < 0;
  least = least.masked_fill(is_negative, std::log(1 - options().clip_low));
  most = most.masked_fill(is_negative, options().dual_clip > 0 ? std::log(options().dual_clip) : kUnbounded);
  return advantage * at::exp(at::minimum(at::maximum(log_ratio, least), most));
}

ObjectiveValue PolicyGradient::value(const at::Tensor& logprobs, const TermTensors& terms,
                                     const TermUnits& units) const {
  const at::Tensor &advantage = terms.columns[0], &old_logprob = terms.columns[1];
  // old_logprob is NaN if the data have none.
  const at::Tensor log_mismatch =
      logprobs - at::where(old_logprob.eq(old_logprob), old_logprob, logprobs.detach());
  const at::Tensor log_ratio = weighs() ? logprobs - logprobs.detach() : log_mismatch;
  const Weights weights = weighs() ? importance_weights(log_mismatch, units) : Weights{};
  Surrogate surrogate = this->surrogate({logprobs, log_ratio, advantage, terms.coefficient, units});
  if (weighs()) surrogate.value = surrogate.value * weights.values;
  ObjectiveValue value{.loss = -surrogate.value.sum(), .metrics = {}};
  surrogate.value.reset();
  if (surrogate.is_clipped.defined()) value.metrics.push_back(surrogate.is_clipped.sum());
  value.metrics.push_back(surrogate.ratio.sum());
  value.metrics.push_back(surrogate.ratio.amin());
  value.metrics.push_back(surrogate.ratio.amax());
  const at::Tensor mismatch = log_mismatch.detach();
  value.metrics.push_back((mismatch.expm1() - mismatch).sum());
  if (weighs()) {
    value.metrics.push_back(weights.values.sum());
    value.metrics.push_back(weights.is_changed.sum());
  }
  if (options().has_kl_in(KlPlace::kLoss)) {
    const at::Tensor log_ratio_to_reference = logprobs - terms.columns[2];
    const KlEstimator estimator = options().kl_estimator;
    value.metrics.push_back(
        kl_estimate(log_ratio_to_reference.detach(), estimator, at::ones_like(terms.coefficient)).sum());
    value.loss = value.loss +
                 kl_estimate(log_ratio_to_reference, estimator, options().kl_coef * terms.coefficient).sum();
  }
  return value;
}

at::Tensor PolicyGradient::reference(std::span<const ReferenceTrajectory> group) const {
  std::vector<at::Tensor> addends;
  for (const auto& [logprobs, terms] : group) {
    const at::Tensor old_logprobs = terms.columns[1];
    const bool on_policy = old_logprobs.isnan().all().item<bool>();
    const at::Tensor behaviour = on_policy ? logprobs.detach() : old_logprobs;
    at::Tensor weights = at::ones_like(logprobs);
    if (weighs()) {
      const at::Tensor difference = logprobs.detach() - behaviour;
      weights = options().importance_level == ImportanceLevel::kToken ? difference.exp()
                                                                      : weights * difference.sum().exp();
      if (options().importance_weights == ImportanceWeights::kTruncate) {
        weights = at::minimum(weights, at::full_like(weights, options().importance_cap));
      } else {
        const at::Tensor is_inside =
            (weights >= options().importance_floor).logical_and(weights <= options().importance_cap);
        weights = at::where(is_inside, weights, at::zeros_like(weights));
      }
    }
    const at::Tensor log_ratio = weighs() ? logprobs - logprobs.detach() : logprobs - behaviour;
    at::Tensor term_losses = -weights * plain_surrogate(logprobs, log_ratio, terms);
    if (options().has_kl_in(KlPlace::kLoss)) {
      term_losses = term_losses +
                    options().kl_coef * plain_divergence(logprobs, terms.columns[2], options().kl_estimator);
    }
    addends.push_back(terms.coefficient * term_losses);
  }
  return at::cat(addends);
}

TermBytes PolicyGradient::term_bytes() const {
  // Graph: the slope. Running: log-probability, log-ratio, ratio, its clipped value, the scale and an
  // exponential; two masks.
  TermBytes bytes{.batch = kTermIndexBytes + 3 * kTermRealBytes,
                  .graph = kTermRealBytes,
                  .running = 6 * kTermRealBytes + 2 * kTermFlagBytes};
  if (weighs()) bytes.graph += kTermRealBytes;  // the weight; while running, the log-ratio too
  if (weighs()) bytes.running += 2 * kTermRealBytes;
  if (options().has_kl_in(KlPlace::kLoss)) {
    bytes.batch += kTermRealBytes;
    bytes.graph += kTermRealBytes;
    bytes.running += kTermRealBytes;
  }
  return bytes;
}

}  // namespace espalier
