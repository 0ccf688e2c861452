// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/grpo.h"

#include <ATen/ATen.h>

namespace espalier {

std::vector<TermColumn> Grpo::columns() const {
  return {TermColumn::kAdvantage, TermColumn::kOldLogprob};
}

std::vector<std::string> Grpo::metrics() const {
  return {"clip_fraction", "ratio_mean", "mismatch_kl"};
}

ObjectiveValue Grpo::value(const at::Tensor& logprobs, const TermTensors& terms, const TermUnits&) const {
  const at::Tensor &advantage = terms.columns[0], &old_logprob = terms.columns[1];
  const at::Tensor is_given = old_logprob.eq(old_logprob);  // NaN where the data have none
  const at::Tensor log_ratio = logprobs - at::where(is_given, old_logprob, logprobs.detach());
  const at::Tensor ratio = log_ratio.exp();
  const at::Tensor plain = ratio * advantage;
  const at::Tensor clipped = ratio.clamp(1 - options().clip_low, 1 + options().clip_high) * advantage;
  ObjectiveValue value{.loss = -(terms.coefficient * at::minimum(plain, clipped)).sum(), .metrics = {}};
  const at::Tensor ratio_value = ratio.detach();
  value.metrics = {(clipped.detach() < plain.detach()).sum(), ratio_value.sum(),
                   (ratio_value - 1 - log_ratio.detach()).sum()};
  return value;
}

at::Tensor Grpo::reference(std::span<const ReferenceTrajectory> group) const {
  std::vector<at::Tensor> addends;
  for (const auto& [logprobs, terms] : group) {
    const at::Tensor advantage = terms.columns[0], old_logprobs = terms.columns[1];
    const bool on_policy = old_logprobs.isnan().all().item<bool>();
    const at::Tensor behaviour = on_policy ? logprobs.detach() : old_logprobs;
    const at::Tensor ratio = at::exp(logprobs - behaviour);
    const at::Tensor bounded = at::clamp(ratio, 1 - options().clip_low, 1 + options().clip_high);
    addends.push_back(terms.coefficient * -at::minimum(ratio * advantage, bounded * advantage));
  }
  return at::cat(addends);
}

TermBytes Grpo::term_bytes() const {
  // Graph: ratio, plain and clipped. Running: log-probability, log-ratio and two results; or the gradients of
  // the minimum and of both its sides, one of them on the way, and where they are equal.
  return {.batch = kTermIndexBytes + 3 * kTermRealBytes,
          .graph = 3 * kTermRealBytes,
          .running = 4 * kTermRealBytes + 2 * kTermFlagBytes};
}

}  // namespace espalier
