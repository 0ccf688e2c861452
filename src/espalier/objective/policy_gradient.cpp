// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/policy_gradient.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "espalier/objective/kl.h"

namespace espalier {

at::Tensor sum_by_trajectory(const at::Tensor& of_terms, const TermUnits& units) {
  return at::zeros({units.num_trajectories}, of_terms.options()).index_add(0, units.trajectory, of_terms);
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

ObjectiveValue PolicyGradient::value(const at::Tensor& logprobs, const TermTensors& terms,
                                     const TermUnits& units) const {
  const at::Tensor &advantage = terms.columns[0], &old_logprob = terms.columns[1];
  const at::Tensor is_given = old_logprob.eq(old_logprob);  // NaN where the data have none
  const at::Tensor log_mismatch = logprobs - at::where(is_given, old_logprob, logprobs.detach());
  const at::Tensor log_ratio = weighs() ? logprobs - logprobs.detach() : log_mismatch;
  const Weights weights = weighs() ? importance_weights(log_mismatch, units) : Weights{};
  Surrogate surrogate = this->surrogate({logprobs, log_ratio, advantage, terms.coefficient, units});
  if (weighs()) surrogate.value = surrogate.value * weights.values;
  ObjectiveValue value{.loss = -(terms.coefficient * surrogate.value).sum(), .metrics = {}};
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
    const at::Tensor kl = kl_estimate(logprobs - terms.columns[2], options().kl_estimator);
    value.metrics.push_back(kl.detach().sum());
    value.loss = value.loss + options().kl_coef * (terms.coefficient * kl).sum();
  }
  return value;
}

namespace {

// kl_estimate once more, as it is printed.
at::Tensor plain_divergence(const at::Tensor& logprobs, const at::Tensor& reference, KlEstimator estimator) {
  const at::Tensor ratio = at::exp(reference - logprobs);
  if (estimator == KlEstimator::kK1) return -at::log(ratio);
  if (estimator == KlEstimator::kK2) return 0.5 * at::log(ratio).pow(2);
  return ratio - 1 - at::log(ratio);
}

}  // namespace

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
        weights = weights * (weights >= options().importance_floor) * (weights <= options().importance_cap);
      }
    }
    const at::Tensor log_ratio = weighs() ? logprobs - logprobs.detach() : logprobs - behaviour;
    at::Tensor of_terms = -weights * plain_surrogate(logprobs, log_ratio, terms);
    if (options().has_kl_in(KlPlace::kLoss)) {
      of_terms =
          of_terms + options().kl_coef * plain_divergence(logprobs, terms.columns[2], options().kl_estimator);
    }
    addends.push_back(terms.coefficient * of_terms);
  }
  return at::cat(addends);
}

TermBytes PolicyGradient::term_bytes() const {
  // Graph: ratio, and both sides of a minimum. Running: log-probability, log-ratio and two results; or the
  // gradients of the minimum and of both its sides, one of them on the way, and where they are equal.
  TermBytes bytes{.batch = kTermIndexBytes + 3 * kTermRealBytes,
                  .graph = 3 * kTermRealBytes,
                  .running = 4 * kTermRealBytes + 2 * kTermFlagBytes};
  if (weighs()) bytes.graph += kTermRealBytes;  // the weight; the log-ratio is one more while it runs
  if (weighs()) bytes.running += 2 * kTermRealBytes;
  if (options().has_kl_in(KlPlace::kLoss)) {
    bytes.batch += kTermRealBytes;
    bytes.graph += kTermRealBytes;
    bytes.running += kTermRealBytes;
  }
  return bytes;
}

}  // namespace espalier
