// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/step_sums.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "espalier/engine/logprob_pass.h"
#include "espalier/runtime/device.h"

namespace espalier {
namespace {

/// The initial value of a reduction.
double initial_value(Reduction reduction) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (reduction == Reduction::kMin) return kInfinity;
  return reduction == Reduction::kMax ? -kInfinity : 0;
}

RankReduction over_ranks(Reduction reduction) {
  if (reduction == Reduction::kMin) return RankReduction::kMin;
  return reduction == Reduction::kMax ? RankReduction::kMax : RankReduction::kSum;
}

void add_to_metric(Reduction reduction, const at::Tensor& value, const at::Tensor& so_far) {
  switch (reduction) {
    case Reduction::kMean:
    case Reduction::kMeanOfUnits:
    case Reduction::kSum:
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

TermTensors terms_with_topk(const Batch& batch, const at::Tensor& logprobs) {
  TermTensors terms = batch.terms;
  if (!batch.topk_edge.defined()) return terms;
  terms.topk_logprobs =
      logprobs.to(at::kDouble).index_select(0, batch.topk_edge.flatten()).view_as(batch.topk_edge);
  return terms;
}

}  // namespace

StepSums::StepSums(const Loss& loss, at::Device device, const std::optional<UnitLoss>& units) : loss_(&loss) {
  std::vector<double> initial{0};  // the loss, then each metric
  for (int64_t part = 0; part < loss.num_parts(); ++part) {
    parts_.push_back({std::ssize(initial), units ? units->num_units(part) : 0});
    for (const Metric& metric : metrics_of(part)) {
      const double scale = metric.reduction == Reduction::kSum ? 1 / loss.part_weight(part) : 1;
      std::string name =
          loss.is_mix() ? fmt::format("{}/{}", metric.name, loss.part_name(part)) : metric.name;
      metrics_.push_back({std::move(name), metric.reduction, part, scale});
      initial.push_back(initial_value(metric.reduction));
    }
  }
  values_ = upload({at::tensor(initial, at::kDouble)}, device).front();
}

StepSums::Read StepSums::read(const Group& group) const {
  const at::Tensor host = values_.cpu();
  const double* here = host.const_data_ptr<double>();
  std::vector<double> sums(here, here + host.numel());  // and of each part its units and terms
  std::vector<RankReduction> ways{RankReduction::kSum};
  for (const SummedMetric& metric : metrics_) ways.push_back(over_ranks(metric.reduction));
  const size_t first_count = sums.size();
  for (const Part& part : parts_) {
    sums.insert(sums.end(), {static_cast<double>(part.num_units), static_cast<double>(part.num_terms)});
    ways.insert(ways.end(), 2, RankReduction::kSum);
  }
  sums = group.reduce(sums, ways);
  Read result{sums[0], {}};
  for (size_t i = 0; i < metrics_.size(); ++i) {
    const auto& [name, reduction, part, scale] = metrics_[i];
    const double num_units = sums[first_count + 2 * part], num_terms = sums[first_count + 2 * part + 1];
    if (num_terms == 0) continue;
    const double count = reduction == Reduction::kMean          ? num_terms
                         : reduction == Reduction::kMeanOfUnits ? num_units
                                                                : 1;
    result.metrics.push_back({name, scale * sums[1 + i] / std::max(1.0, count)});
  }
  return result;
}

Entropies StepSums::entropies() const {
  Entropies result = Entropies::kNone;
  for (int64_t part = 0; part < loss_->num_parts(); ++part) {
    if (options_of(part).entropy_coef != 0) return Entropies::kDifferentiable;
    if (reports_entropy(part)) result = Entropies::kDetached;
  }
  return result;
}

/// Metrics of a part: in a mix its loss, then those of the objective, then the entropy if it is reported.
std::vector<Metric> StepSums::metrics_of(int64_t part) const {
  std::vector<Metric> metrics = loss_->part(part).objective().metrics();
  if (loss_->is_mix()) metrics.insert(metrics.begin(), {"loss", Reduction::kSum});
  if (reports_entropy(part)) metrics.push_back({"entropy"});
  return metrics;
}

at::Tensor StepSums::add(const Batch& batch, const at::Tensor& logprobs, const ForwardResult& forwarded) {
  const HeadValues values{logprobs, forwarded.entropy, terms_with_topk(batch, forwarded.logprobs)};
  at::Tensor loss;
  for (int64_t part = 0; part < loss_->num_parts(); ++part) {
    const at::Tensor addend = add_part(part, batch, values);
    if (addend.defined()) loss = loss.defined() ? loss + addend : addend;
  }
  return loss;
}

void StepSums::add(const std::vector<UnitLoss::PartValue>& values) {
  for (const UnitLoss::PartValue& part_value : values) add_value(part_value.part, part_value.value);
}

/// Returns the part's loss in the graph; undefined without terms, or without entropy bonus and token scope.
at::Tensor StepSums::add_part(int64_t part, const Batch& batch, const HeadValues& values) {
  const at::Tensor index = loss_->is_mix() ? batch.part_terms[part] : at::Tensor();
  const int64_t num_terms = index.defined() ? index.size(0) : batch.num_terms();
  if (num_terms == 0) return {};
  parts_[part].num_terms += num_terms;
  const auto select_part = [&](const at::Tensor& batch_values) {
    return index.defined() ? batch_values.index_select(0, index) : batch_values;
  };
  at::Tensor loss;
  if (reports_entropy(part)) {
    const at::Tensor entropy = select_part(values_of_terms(batch, values.edge_entropy));
    loss = add_entropies(part, select_part(batch.terms.coefficient), entropy);
  }
  const Loss& own = loss_->part(part);
  if (own.is_wide()) return loss;
  const ObjectiveValue value = own.objective().value(select_part(values.logprobs),
                                                     loss_->terms_of_part(part, values.terms, index), {});
  add_value(part, value);
  return loss.defined() ? loss + value.loss : value.loss;
}

/// Adds to the entropy metric, the part's last one. Returns the entropy bonus; undefined if there is none.
at::Tensor StepSums::add_entropies(int64_t part, const at::Tensor& coefficients, const at::Tensor& entropy) {
  const int64_t last = parts_[part].first_metric + std::ssize(metrics_of(part)) - 1;
  values_.select(0, last).add_(entropy.detach().sum());
  const double coef = options_of(part).entropy_coef;
  if (coef == 0) return {};
  const at::Tensor bonus = -coef * (coefficients * entropy).sum();
  add_to_loss(part, bonus);
  return bonus;
}

void StepSums::add_to_loss(int64_t part, const at::Tensor& loss) {
  values_.select(0, 0).add_(loss.detach());
  if (loss_->is_mix()) values_.select(0, parts_[part].first_metric).add_(loss.detach());
}

void StepSums::add_value(int64_t part, const ObjectiveValue& value) {
  add_to_loss(part, value.loss);
  const int64_t first = parts_[part].first_metric + (loss_->is_mix() ? 1 : 0);
  for (size_t i = 0; i < value.metrics.size(); ++i) {
    const int64_t metric = first + static_cast<int64_t>(i);
    add_to_metric(metrics_[metric - 1].reduction, value.metrics[i], values_.select(0, metric));
  }
}

}  // namespace espalier
