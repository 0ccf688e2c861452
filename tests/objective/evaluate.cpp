// SPDX-License-Identifier: Apache-2.0
#include "tests/objective/evaluate.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

namespace espalier::testing {
namespace {

double column_of(const Policy& term, TermColumn column) {
  switch (column) {
    case TermColumn::kAdvantage:
      return term.advantage;
    case TermColumn::kOldLogprob:
      return term.has_old ? term.old_logprob : std::numeric_limits<double>::quiet_NaN();
    case TermColumn::kRefLogprob:
      return term.ref_logprob;
    case TermColumn::kWeight:
      return term.weight;
    case TermColumn::kChosen:
      return term.chosen;
  }
  return 0;
}

std::vector<double> numbers(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.contiguous();
  return {flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel()};
}

TermTensors tensors_of(const Objective& objective, const std::vector<Policy>& terms) {
  std::vector<double> coefficients;
  for (const Policy& term : terms) coefficients.push_back(term.coefficient);
  TermTensors tensors{at::tensor(coefficients, at::kDouble), {}};
  for (const TermColumn column : objective.columns()) {
    std::vector<double> values;
    for (const Policy& term : terms) values.push_back(column_of(term, column));
    tensors.columns.push_back(at::tensor(values, at::kDouble));
  }
  return tensors;
}

// Terms of one trajectory by those of all.
ReferenceTrajectory part_of(const at::Tensor& logprobs, const TermTensors& terms, int64_t begin,
                            int64_t end) {
  ReferenceTrajectory part{logprobs.slice(0, begin, end), {terms.coefficient.slice(0, begin, end), {}}};
  for (const at::Tensor& column : terms.columns) part.terms.columns.push_back(column.slice(0, begin, end));
  return part;
}

at::Tensor reference_loss(const Objective& objective, const at::Tensor& logprobs, const TermTensors& tensors,
                          const std::vector<Policy>& terms) {
  std::vector<ReferenceTrajectory> rows;
  std::vector<int64_t> pairs;
  int64_t begin = 0;
  const auto size = static_cast<int64_t>(terms.size());
  for (int64_t end = 1; end <= size; ++end) {
    if (end < size && terms[end].trajectory == terms[begin].trajectory) continue;
    rows.push_back(part_of(logprobs, tensors, begin, end));
    pairs.push_back(terms[begin].pair);
    begin = end;
  }
  if (objective.scope() == Scope::kStep) return objective.reference(rows).sum();
  at::Tensor loss = at::zeros({}, at::kDouble);
  std::map<int64_t, std::vector<ReferenceTrajectory>> units;
  for (size_t row = 0; row < rows.size(); ++row) {
    const bool is_pair = objective.scope() == Scope::kPair;
    units[is_pair ? pairs[row] : static_cast<int64_t>(row)].push_back(rows[row]);
  }
  for (const auto& [unit, of_unit] : units) loss = loss + objective.reference(of_unit).sum();
  return loss;
}

}  // namespace

double Result::loss() const {
  return value.loss.item<double>();
}

double Result::metric(const std::string& name) const {
  EXPECT_EQ(metrics.size(), value.metrics.size());
  for (size_t i = 0; i < metrics.size(); ++i) {
    if (metrics[i].name == name) return value.metrics[i].to(at::kDouble).item<double>();
  }
  ADD_FAILURE() << "no metric " << name;
  return 0;
}

namespace {

at::Tensor leaf_of(const std::vector<Policy>& terms) {
  std::vector<double> logprobs;
  for (const Policy& term : terms) logprobs.push_back(term.logprob);
  return at::tensor(logprobs, at::kDouble).requires_grad_();
}

}  // namespace

Result evaluate_alone(const ObjectiveOptions& options, const std::vector<Policy>& terms) {
  const auto objective = make_objective(options);
  std::vector<int64_t> trajectory;
  for (const Policy& term : terms) trajectory.push_back(term.trajectory);
  TermUnits units;
  if (objective->scope() != Scope::kToken) {
    const int64_t count = trajectory.back() + 1;
    std::vector<int64_t> unit_of(count);
    for (const Policy& term : terms) {
      unit_of[term.trajectory] = objective->scope() == Scope::kPair ? term.pair : 0;
    }
    const int64_t num_units = *std::ranges::max_element(unit_of) + 1;
    units = {at::tensor(trajectory, at::kLong), at::tensor(unit_of, at::kLong), count, num_units};
  }
  const at::Tensor leaf = leaf_of(terms);
  Result result{.value = objective->value(leaf, tensors_of(*objective, terms), units),
                .metrics = objective->metrics()};
  result.gradient = numbers(torch::autograd::grad({result.value.loss}, {leaf})[0]);
  return result;
}

Result evaluate(const ObjectiveOptions& options, const std::vector<Policy>& terms) {
  Result result = evaluate_alone(options, terms);
  const auto objective = make_objective(options);
  const at::Tensor leaf = leaf_of(terms);
  const at::Tensor plain = reference_loss(*objective, leaf, tensors_of(*objective, terms), terms);
  EXPECT_NEAR(plain.item<double>(), result.loss(), 1e-13 * (1 + std::abs(result.loss())));
  const std::vector<double> plain_gradient = numbers(torch::autograd::grad({plain}, {leaf})[0]);
  for (size_t i = 0; i < terms.size(); ++i) {
    EXPECT_NEAR(result.gradient[i], plain_gradient[i], 1e-13 * (1 + std::abs(plain_gradient[i])))
        << "term " << i;
  }
  return result;
}

void expect_finite_differences(const ObjectiveOptions& options, std::vector<Policy> terms) {
  constexpr double kStep = 1e-6;
  const std::vector<double> gradient = evaluate(options, terms).gradient;
  for (size_t i = 0; i < terms.size(); ++i) {
    const double logprob = terms[i].logprob;
    terms[i].logprob = logprob + kStep;
    const double above = evaluate(options, terms).loss();
    terms[i].logprob = logprob - kStep;
    const double below = evaluate(options, terms).loss();
    terms[i].logprob = logprob;
    EXPECT_NEAR((above - below) / (2 * kStep), gradient[i], 1e-7 * (1 + std::abs(gradient[i])))
        << "term " << i;
  }
}

}  // namespace espalier::testing
