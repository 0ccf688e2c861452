// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/unit_loss.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "espalier/distributed/group.h"
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
  for (const TermColumn column : loss.columns()) {
    std::vector<double> values;
    for (size_t k = 0; k < step.rows.size(); ++k) {
      const auto end = step.terms.offsets[k + 1];
      for (int64_t index = step.terms.offsets[k]; index < end; ++index) {
        values.push_back(term_column(step, loss, column, static_cast<int64_t>(k), index));
      }
    }
    host.push_back(reals(values));
  }
  const std::vector<at::Tensor> uploaded = upload(host, device);
  return {uploaded.front(), {uploaded.begin() + 1, uploaded.end()}};
}

}  // namespace

UnitLoss::UnitLoss(const Step& step, const Loss& loss, at::Device device)
    : step_(step),
      loss_(loss),
      group_(step.context_group == nullptr ? alone() : *step.context_group),
      device_(device),
      units_(loss_units(step, loss)),
      needs_logprob_pass_(espalier::needs_logprob_pass(step, units_)),
      terms_(all_terms_of(step, loss, device)),
      logprobs_(at::zeros_like(terms_.coefficient)),
      gradients_(at::zeros_like(terms_.coefficient)),
      evaluated_(units_.trajectories.size()) {}

void UnitLoss::add(const Batch& batch, const at::Tensor& logprobs) {
  const at::Tensor index = upload({integers(batch.term_index)}, device_).front();
  logprobs_.index_copy_(0, index, logprobs.detach());
}

at::Tensor UnitLoss::gradients(const Batch& batch) const {
  return gradients_.index_select(0, upload({integers(batch.term_index)}, device_).front());
}

std::vector<UnitLoss::PartValue> UnitLoss::evaluate_all() {
  std::vector<int64_t> units;
  for (size_t unit = 0; unit < evaluated_.size(); ++unit) {
    if (!units_.micro_batches_of_unit[unit].empty()) units.push_back(static_cast<int64_t>(unit));
  }
  return evaluate_units(units);
}

int64_t UnitLoss::num_units(int64_t part) const {
  int64_t count = 0;
  if (!group_.is_first()) return count;
  for (size_t unit = 0; unit < units_.trajectories.size(); ++unit) {
    count += !units_.micro_batches_of_unit[unit].empty() && part_of_unit(static_cast<int64_t>(unit)) == part;
  }
  return count;
}

std::vector<UnitLoss::PartValue> UnitLoss::evaluate_units(const std::vector<int64_t>& units) {
  std::vector<std::vector<int64_t>> due(loss_.num_parts());
  for (const int64_t unit : units) {
    if (!evaluated_[unit]) due[part_of_unit(unit)].push_back(unit);
  }
  std::vector<PartValue> values;
  for (int64_t part = 0; part < loss_.num_parts(); ++part) {
    if (!due[part].empty()) values.push_back({part, evaluate_part(part, due[part])});
  }
  if (!group_.is_first()) values.clear();
  return values;
}

ObjectiveValue UnitLoss::evaluate_part(int64_t part, const std::vector<int64_t>& units) {
  std::vector<int64_t> term_index, trajectory_of_term, group_of_trajectory;
  for (size_t u = 0; u < units.size(); ++u) {
    evaluated_[units[u]] = true;
    for (const int64_t k : units_.trajectories[units[u]]) {
      if (step_.terms.row_size(k) == 0) continue;
      const auto trajectory = static_cast<int64_t>(group_of_trajectory.size());
      group_of_trajectory.push_back(static_cast<int64_t>(u));
      for (int64_t i = step_.terms.offsets[k]; i < step_.terms.offsets[k + 1]; ++i) {
        term_index.push_back(i);
        trajectory_of_term.push_back(trajectory);
      }
    }
  }
  const std::vector<at::Tensor> uploaded =
      upload({integers(term_index), integers(trajectory_of_term), integers(group_of_trajectory)}, device_);
  const at::Tensor& index = uploaded[0];
  const TermUnits term_units{uploaded[1], uploaded[2], static_cast<int64_t>(group_of_trajectory.size()),
                             static_cast<int64_t>(units.size())};
  const TermTensors terms = loss_.terms_of_part(part, terms_, index);
  const at::Tensor values = logprobs_.index_select(0, index).detach();
  group_.add_up({values});  // a term is on one rank
  const at::AutoGradMode with_graph(true);
  const at::Tensor logprobs = values.detach().requires_grad_();
  ObjectiveValue value = loss_.part(part).objective().value(logprobs, terms, term_units);
  const std::vector<at::Tensor> gradient = torch::autograd::grad({value.loss}, {logprobs});
  gradients_.index_copy_(0, index, gradient.front());
  value.loss = value.loss.detach();
  return value;
}

std::optional<UnitLoss> make_unit_loss(const Step& step, const Loss& loss, at::Device device) {
  return loss.is_wide() ? std::make_optional<UnitLoss>(step, loss, device) : std::nullopt;
}

}  // namespace espalier
