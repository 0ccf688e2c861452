// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/opd_topk.h"

#include <ATen/ATen.h>

namespace espalier {
namespace {

constexpr double kLeastRest = 1e-8;

}  // namespace

std::vector<Metric> OpdTopk::metrics() const {
  return {{"reverse_kl"}, {"topk_mass"}};
}

ObjectiveValue OpdTopk::value(const at::Tensor&, const TermTensors& terms, const TermUnits&) const {
  at::Tensor student = terms.topk_logprobs, teacher = terms.topk_ref_logprobs;
  const at::Tensor mass = student.detach().exp().sum(-1);
  if (options().ref_topk == RefTopk::kRenormalize) {
    student = student.log_softmax(-1);
    teacher = teacher.log_softmax(-1);
  }
  const at::Tensor probability = student.exp();
  at::Tensor divergence = (probability * (student - teacher)).sum(-1);
  if (options().ref_topk == RefTopk::kRest) {
    const at::Tensor rest = (1 - probability.sum(-1)).clamp_min(kLeastRest);
    const at::Tensor teacher_rest = (1 - teacher.exp().sum(-1)).clamp_min(kLeastRest);
    divergence = divergence + rest * (rest.log() - teacher_rest.log());
  }
  return {.loss = (terms.coefficient * divergence).sum(), .metrics = {divergence.detach().sum(), mass.sum()}};
}

at::Tensor OpdTopk::reference(std::span<const ReferenceTrajectory> group) const {
  std::vector<at::Tensor> addends;
  for (const ReferenceTrajectory& trajectory : group) {
    at::Tensor log_p = trajectory.terms.topk_logprobs, log_q = trajectory.terms.topk_ref_logprobs;
    if (options().ref_topk == RefTopk::kRenormalize) {
      log_p = log_p - log_p.logsumexp(1, /*keepdim=*/true);
      log_q = log_q - log_q.logsumexp(1, /*keepdim=*/true);
    } else {
      // One more entry, the probability of all other tokens.
      const at::Tensor least = at::full({log_p.size(0), 1}, kLeastRest, log_p.options());
      log_p = at::cat({log_p, at::log(at::maximum(1 - log_p.exp().sum(1, true), least))}, 1);
      log_q = at::cat({log_q, at::log(at::maximum(1 - log_q.exp().sum(1, true), least))}, 1);
    }
    addends.push_back(trajectory.terms.coefficient * (log_p.exp() * (log_p - log_q)).sum(1));
  }
  return at::cat(addends);
}

TermBytes OpdTopk::term_bytes() const {
  // Batch: index and coefficient. Graph: the divergence and the rest. The K tokens are counted by the free
  // function term_bytes().
  return {.batch = kTermIndexBytes + kTermRealBytes,
          .graph = 3 * kTermRealBytes,
          .running = 4 * kTermRealBytes + kTermFlagBytes};
}

}  // namespace espalier
