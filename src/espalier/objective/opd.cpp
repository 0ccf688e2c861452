// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include "espalier/objective/exponentials.h"
#include "espalier/objective/objective.h"

namespace espalier {
namespace {

/// On-policy distillation: the student's own samples, scored by a teacher.
///   loss = sum over the terms of coefficient * -r A,   A = stopgrad(log q - log p),   r = exp(log p - log
///   mu)
/// log q is the teacher's log-probability of the token (field `ref_logprobs`) and log mu that of the policy
/// that sampled it (`logprobs`), or stopgrad(log p) where the data have none. The gradient is that of the
/// reverse divergence KL(p | q), estimated from samples, token by token (Agarwal et al., "On-policy
/// distillation of language models", 2023, section 3; Lu et al., "On-policy distillation", Thinking Machines
/// Lab, 2025, whose advantage is A).
///
/// Metrics: reverse_kl (mean of log p - log q), ratio_mean, ratio_min, ratio_max, mismatch_kl (as of
/// PolicyGradient).
class Opd : public Objective {
 public:
  using Objective::Objective;

  std::vector<TermColumn> columns() const override {
    return {TermColumn::kOldLogprob, TermColumn::kRefLogprob};
  }

  std::vector<Metric> metrics() const override {
    return {{"reverse_kl"},
            {"ratio_mean"},
            {"ratio_min", Reduction::kMin},
            {"ratio_max", Reduction::kMax},
            {"mismatch_kl"}};
  }

  ObjectiveValue value(const at::Tensor& logprobs, const TermTensors& terms,
                       const TermUnits&) const override {
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

  at::Tensor reference(std::span<const ReferenceTrajectory> group) const override {
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

  TermBytes term_bytes() const override {
    // Graph: the slope. Running: log-probability, log-ratio, ratio, divergence, its scale and an exponential.
    return {.batch = kTermIndexBytes + 3 * kTermRealBytes,
            .graph = kTermRealBytes,
            .running = 6 * kTermRealBytes + kTermFlagBytes};
  }
};

constexpr double kLeastRest = 1e-8;

/// On-policy distillation over the most likely tokens of the teacher.
///   loss = sum over the terms of coefficient * D
/// D is the reverse divergence of the student p from the teacher q at the term's position, restricted to the
/// teacher's K most likely tokens v in S (fields `ref_topk_ids`, `ref_topk_logprobs`):
///   rest:         D = sum over S of p log(p / q) + (1 - P) log((1 - P) / (1 - Q))
///   renormalize:  D = sum over S of p' log(p' / q'),  p' = p / P,  q' = q / Q
/// with P and Q the sums of p and q over S.
/// Over all of the vocabulary both are KL(p | q), the divergence of "Generalized knowledge distillation"
/// (Agarwal et al., "On-policy distillation of language models", 2023, section 3, algorithm 1 with reverse KL
/// on samples of the student, through which no gradient flows). With `rest` all other tokens are merged into
/// one, so that D <= KL(p | q) (the log-sum inequality: Cover and Thomas, "Elements of information theory",
/// theorem 2.7.1) and probability mass of the student outside of S is penalised; with `renormalize` it is
/// not. 1 - P and 1 - Q are clamped to at least 1e-8: below that they are float32 rounding.
///
/// D does not depend on the sampled token, so it needs no importance ratio.
/// Metrics: reverse_kl (mean of D), topk_mass (mean of P).
class OpdTopk : public Objective {
 public:
  using Objective::Objective;

  std::vector<Metric> metrics() const override { return {{"reverse_kl"}, {"topk_mass"}}; }

  ObjectiveValue value(const at::Tensor&, const TermTensors& terms, const TermUnits&) const override {
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
    return {.loss = (terms.coefficient * divergence).sum(),
            .metrics = {divergence.detach().sum(), mass.sum()}};
  }

  at::Tensor reference(std::span<const ReferenceTrajectory> group) const override {
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

  TermBytes term_bytes() const override {
    // Batch: index and coefficient. Graph: the divergence and the rest. The K tokens are counted by the free
    // function term_bytes().
    return {.batch = kTermIndexBytes + kTermRealBytes,
            .graph = 3 * kTermRealBytes,
            .running = 4 * kTermRealBytes + kTermFlagBytes};
  }
};

}  // namespace

std::shared_ptr<const Objective> detail::make_opd(const ObjectiveOptions& options) {
  if (options.ref_topk != RefTopk::kNone) return std::make_shared<OpdTopk>(options);
  return std::make_shared<Opd>(options);
}

}  // namespace espalier
