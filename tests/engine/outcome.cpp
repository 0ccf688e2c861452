// SPDX-License-Identifier: Apache-2.0
#include "tests/engine/outcome.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <cmath>
#include <limits>

namespace espalier::testing {
namespace {

std::vector<at::Tensor> take_gradients(const Decoder& decoder) {
  std::vector<at::Tensor> result;
  const std::vector<at::Tensor> sums = decoder.gradients();
  for (size_t i = 0; i < sums.size(); ++i) {
    const at::Tensor& sum = sums[i];
    result.push_back(sum.defined() ? sum.to(at::kDouble).clone()
                                   : at::zeros_like(decoder.parameters()[i].value, at::kDouble));
  }
  decoder.zero_gradients();
  return result;
}

double length(const at::Tensor& tensor) {
  return tensor.norm().item<double>();
}

}  // namespace

Outcome reference_outcome(const Decoder& decoder, const Trajectories& trajectories,
                          const ObjectiveOptions& objective) {
  return reference_outcome(decoder, Loss(trajectories, objective));
}

Outcome reference_outcome(const Decoder& decoder, const Loss& loss) {
  decoder.zero_gradients();
  Outcome outcome;
  outcome.logprobs.resize(loss.trajectories().num_tokens());
  const ReferenceLoss reference = per_trajectory_forward_backward(decoder, loss, &outcome.logprobs);
  outcome.loss = reference.value;
  outcome.loss_size = reference.size;
  outcome.gradients = take_gradients(decoder);
  return outcome;
}

Outcome tree_outcome(const Decoder& decoder, const Trajectories& trajectories, const Step& step,
                     const ObjectiveOptions& objective) {
  return tree_outcome(decoder, step, Loss(trajectories, objective));
}

Outcome tree_outcome(const Decoder& decoder, const Step& step, const Loss& loss) {
  decoder.zero_gradients();
  Outcome outcome;
  outcome.loss = forward_backward(decoder, step, loss).loss;
  outcome.gradients = take_gradients(decoder);
  outcome.logprobs.resize(loss.trajectories().num_tokens());
  compute_logprobs(decoder, loss, step, &outcome.logprobs);
  return outcome;
}

std::vector<Batch> make_batches(const Trajectories& trajectories, const Step& step,
                                const ObjectiveOptions& objective) {
  const Loss loss(trajectories, objective);
  std::vector<Batch> batches;
  for (size_t m = 0; m < step.plan.micro_batches.size(); ++m) {
    batches.push_back(make_batch(step, static_cast<int64_t>(m), loss));
  }
  return batches;
}

Outcome batch_outcome(const Decoder& decoder, const std::vector<Batch>& batches,
                      const ObjectiveOptions& objective) {
  decoder.zero_gradients();
  Outcome outcome;
  for (const Batch& batch : batches) {
    if (batch.num_terms() == 0) continue;
    const at::Tensor logprobs =
        forward(decoder, batch, {}, {}).logprobs.to(at::kDouble).index_select(0, batch.term_edge);
    const ObjectiveValue value = make_objective(objective)->value(logprobs, batch.terms, {});
    outcome.loss += value.loss.item<double>();
    torch::autograd::backward({value.loss}, {});
  }
  outcome.gradients = take_gradients(decoder);
  return outcome;
}

double gradient_error(const Outcome& outcome, const Outcome& reference) {
  double squares = 0;
  for (const at::Tensor& gradient : reference.gradients) squares += length(gradient) * length(gradient);
  double worst = 0;
  for (size_t i = 0; i < reference.gradients.size(); ++i) {
    const double scale = std::max(length(reference.gradients[i]), 1e-6 * std::sqrt(squares));
    const double error = length(outcome.gradients[i] - reference.gradients[i]) / scale;
    if (!std::isfinite(error)) return std::numeric_limits<double>::infinity();
    worst = std::max(worst, error);
  }
  return worst;
}

double gradient_rounding(const Decoder& decoder, const Trajectories& trajectories,
                         const ObjectiveOptions& objective, const Outcome& reference) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> weights;
  for (const Parameter& parameter : decoder.parameters()) {
    weights.push_back(parameter.value.clone());
    const at::Tensor signs = at::rand_like(parameter.value).round_().mul_(2).sub_(1);
    parameter.value.mul_(signs.mul_(std::numeric_limits<double>::epsilon()).add_(1));
  }
  const Outcome moved = [&] {
    const at::AutoGradMode with_graph(true);
    return reference_outcome(decoder, trajectories, objective);
  }();
  for (size_t i = 0; i < weights.size(); ++i) decoder.parameters()[i].value.copy_(weights[i]);
  return gradient_error(moved, reference);
}

double loss_error(const Outcome& outcome, const Outcome& reference) {
  const double error = std::abs(outcome.loss - reference.loss) / reference.loss_size;
  return std::isfinite(error) ? error : std::numeric_limits<double>::infinity();
}

double logprob_error(const Outcome& outcome, const Outcome& reference) {
  double worst = 0;
  for (size_t i = 0; i < reference.logprobs.size(); ++i) {
    const double error = std::abs(outcome.logprobs[i] - reference.logprobs[i]);
    if (!(error <= worst)) worst = std::isfinite(error) ? error : std::numeric_limits<double>::infinity();
  }
  return worst;
}

}  // namespace espalier::testing
