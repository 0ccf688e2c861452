// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/loss_sums.h"

#include <ATen/ATen.h>

#include <limits>
#include <vector>

#include "espalier/engine/logprob_pass.h"
#include "espalier/runtime/device.h"

namespace espalier {
namespace {

/// What a metric is reduced from.
double nothing_reduced(Reduction reduction) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (reduction == Reduction::kMin) return kInfinity;
  return reduction == Reduction::kMax ? -kInfinity : 0;
}

void add_to_metric(Reduction reduction, const at::Tensor& value, const at::Tensor& so_far) {
  switch (reduction) {
    case Reduction::kMean:
    case Reduction::kMeanOfUnits:
      so_far.add_(value);
      return;
    case Reduction::kMin:
      so_far.copy_(at::minimum(so_far, value));
      return;
    case Reduction::kMax:
      so_far.copy_(at::maximum(so_far, value));
      return;
  }
}

}  // namespace

void begin_sums(const Model& model, const Step& step, const Loss& loss, PendingStep* pending) {
  std::vector<double> nothing{0};  // of the loss, then of each metric
  std::vector<Metric> metrics = loss.objective().metrics();
  if (has_entropy_bonus(loss)) metrics.push_back({"entropy"});
  for (const Metric& metric : metrics) {
    pending->result.metrics.push_back({metric.name, 0});
    pending->reductions.push_back(metric.reduction);
    nothing.push_back(nothing_reduced(metric.reduction));
  }
  pending->sums = upload({at::tensor(nothing, at::kDouble)}, model.device()).front();
  pending->result.flat_tokens = step.flat_tokens();
  pending->result.tree_tokens = step.forest.tree_tokens();
}

void add_to_sums(const ObjectiveValue& value, PendingStep* pending) {
  pending->sums.select(0, 0).add_(value.loss.detach());
  for (size_t i = 0; i < value.metrics.size(); ++i) {
    const at::Tensor so_far = pending->sums.select(0, static_cast<int64_t>(1 + i));
    add_to_metric(pending->reductions[i], value.metrics[i], so_far);
  }
}

bool has_entropy_bonus(const Loss& loss) {
  return loss.objective().options().entropy_coef != 0;
}

at::Tensor add_entropy_bonus(const Loss& loss, const Batch& batch, const at::Tensor& of_edges,
                             PendingStep* pending) {
  const at::Tensor entropy = values_of_terms(batch, of_edges);
  const double coefficient = loss.objective().options().entropy_coef;
  const at::Tensor bonus = -coefficient * (batch.terms.coefficient * entropy).sum();
  pending->sums.select(0, 0).add_(bonus.detach());
  pending->sums.select(0, -1).add_(entropy.detach().sum());  // the last metric
  return bonus;
}

}  // namespace espalier
