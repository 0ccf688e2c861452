// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/unit_loss.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <numeric>

#include "espalier/runtime/device.h"

namespace espalier {
namespace {

at::Tensor reals(const std::vector<double>& values) {
  return at::tensor(values, at::kDouble);
}

at::Tensor integers(const std::vector<int64_t>& values) {
  return at::tensor(values, at::kLong);
}

TermTensors all_terms_of(const Step& step, const Loss& loss, at::Device device) {
  std::vector<double> coefficients;
  for (const Term& term : step.terms.values) coefficients.push_back(term.coefficient);
  std::vector<at::Tensor> host{reals(coefficients)};
  for (const TermColumn column : loss.objective().columns()) {
    std::vector<double> values;
    for (size_t k = 0; k < step.rows.size(); ++k) {
      const auto end = step.terms.offsets[k + 1];
      for (int64_t index = step.terms.offsets[k]; index < end; ++index) {
        values.push_back(term_column(step, loss, column, static_cast<int64_t>(k), index));
      }
    }
    host.push_back(reals(values));
  }
  std::vector<at::Tensor> there = upload(host, device);
  return {there.front(), {there.begin() + 1, there.end()}};
}

}  // namespace

UnitLoss::UnitLoss(const Step& step, const Loss& loss, at::Device device)
    : step_(step),
      loss_(loss),
      device_(device),
      units_(loss_units(step, loss)),
      needs_logprob_pass_(espalier::needs_logprob_pass(step, units_)),
      terms_(all_terms_of(step, loss, device)),
      logprobs_(at::zeros_like(terms_.coefficient)),
      gradients_(at::zeros_like(terms_.coefficient)),
      evaluated_(units_.trajectories.size()) {}

void UnitLoss::add(const Batch& batch, const at::Tensor& logprobs) {
  const std::vector<at::Tensor> index = upload({integers(batch.term_index)}, device_);
  logprobs_.index_copy_(0, index.front(), logprobs.detach());
}

at::Tensor UnitLoss::gradients(int64_t m, const Batch& batch) {
  std::vector<int64_t> due;
  for (const int64_t unit : units_.of_micro_batch[m]) {
    if (!evaluated_[unit]) due.push_back(unit);
  }
  if (!due.empty()) evaluate(due);
  const std::vector<at::Tensor> index = upload({integers(batch.term_index)}, device_);
  return gradients_.index_select(0, index.front());
}

void UnitLoss::evaluate_all() {
  std::vector<int64_t> due;
  for (size_t unit = 0; unit < evaluated_.size(); ++unit) {
    if (!evaluated_[unit] && !units_.micro_batches_of[unit].empty())
      due.push_back(static_cast<int64_t>(unit));
  }
  if (!due.empty()) evaluate(due);
}

void UnitLoss::evaluate(const std::vector<int64_t>& units) {
  std::vector<int64_t> index, trajectory_of_term, group_of_trajectory;
  for (size_t u = 0; u < units.size(); ++u) {
    evaluated_[units[u]] = true;
    for (const int64_t k : units_.trajectories[units[u]]) {
      if (step_.terms.row_size(k) == 0) continue;
      const auto trajectory = static_cast<int64_t>(group_of_trajectory.size());
      group_of_trajectory.push_back(static_cast<int64_t>(u));
      for (int64_t i = step_.terms.offsets[k]; i < step_.terms.offsets[k + 1]; ++i) {
        index.push_back(i);
        trajectory_of_term.push_back(trajectory);
      }
    }
  }
  const std::vector<at::Tensor> there =
      upload({integers(index), integers(trajectory_of_term), integers(group_of_trajectory)}, device_);
  const TermUnits of_terms{there[1], there[2], static_cast<int64_t>(group_of_trajectory.size()),
                           static_cast<int64_t>(units.size())};
  TermTensors terms{terms_.coefficient.index_select(0, there[0]), {}};
  for (const at::Tensor& column : terms_.columns) terms.columns.push_back(column.index_select(0, there[0]));
  const at::AutoGradMode with_graph(true);
  const at::Tensor logprobs = logprobs_.index_select(0, there[0]).detach().requires_grad_();
  ObjectiveValue value = loss_.objective().value(logprobs, terms, of_terms);
  const std::vector<at::Tensor> gradient = torch::autograd::grad({value.loss}, {logprobs});
  gradients_.index_copy_(0, there[0], gradient.front());
  value.loss = value.loss.detach();
  values_.push_back(std::move(value));
}

}  // namespace espalier
