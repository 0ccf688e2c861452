// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/opd.h"

#include <ATen/ATen.h>

#include "espalier/objective/scaled_exp.h"

namespace espalier {

std::vector<TermColumn> Opd::columns() const {
  return {TermColumn::kOldLogprob, TermColumn::kRefLogprob};
}

std::vector<Metric> Opd::metrics() const {
  return {{"reverse_kl"},
          {"ratio_mean"},
          {"ratio_min", Reduction::kMin},
          {"ratio_max", Reduction::kMax},
          {"mismatch_kl"}};
}

ObjectiveValue Opd::value(const at::Tensor& logprobs, const TermTensors& terms, const TermUnits&) const {
  const at::Tensor &old_logprob = terms.columns[0], &teacher = terms.columns[1];
  const at::Tensor is_given = old_logprob.eq(old_logprob);  // NaN if the data have none
  const at::Tensor log_ratio = logprobs - at::where(is_given, old_logprob, logprobs.detach());
  const at::Tensor ratio = log_ratio.detach().exp();
  const at::Tensor divergence = logprobs.detach() - teacher;
  const at::Tensor term_losses = scaled_exp(terms.coefficient * divergence, log_ratio);
  ObjectiveValue value{.loss = with_slope(term_losses, term_losses, log_ratio).sum(), .metrics = {}};
  const at::Tensor mismatch = log_ratio.detach();
  value.metrics = {divergence.sum(), ratio.sum(), ratio.amin(), ratio.amax(),
                   (mismatch.expm1() - mismatch).sum()};
  return value;
}

at::Tensor Opd::reference(std::span<const ReferenceTrajectory> group) const {
  std::vector<at::Tensor> addends;
  for (const auto& [logprobs, terms] : group) {
    const at::Tensor old_logprobs = terms.columns[0];
    const bool on_policy = old_logprobs.isnan().all().item<bool>();
    const at::Tensor ratio = at::exp(logprobs - (on_policy ? logprobs.detach() : old_logprobs));
    const at::Tensor advantage = (terms.columns[1] - logprobs).detach();
    addends.push_back(-terms.coefficient * ratio * advantage);
  }
  return at::cat(addends);
}

TermBytes Opd::term_bytes() const {
  // Graph: the slope. Running: log-probability, log-ratio, ratio, divergence, its scale and an exponential.
  return {.batch = kTermIndexBytes + 3 * kTermRealBytes,
          .graph = kTermRealBytes,
          .running = 6 * kTermRealBytes + kTermFlagBytes};
}

}  // namespace espalier
