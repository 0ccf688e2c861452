// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/preference.h"

#include <ATen/ATen.h>

#include "espalier/base/check.h"
#include "espalier/objective/policy_gradient.h"

namespace espalier {

TrajectoryScores trajectory_scores(const at::Tensor& logprobs, const TermTensors& terms,
                                   const TermUnits& units, bool averages) {
  const at::Tensor &weight = terms.columns[0], &chosen = terms.columns[1];
  const bool has_reference = terms.columns.size() > 2;
  const at::Tensor log_ratio = has_reference ? logprobs - terms.columns[2] : logprobs;
  const at::Tensor sums = sum_by_trajectory(weight * log_ratio, units);
  const at::Tensor weights = sum_by_trajectory(weight, units);
  return {.score = averages ? sums / weights : sums,
          .share = sum_by_trajectory(terms.coefficient, units) / weights,
          .chosen = sum_by_trajectory(weight * chosen, units) / weights};
}

TrajectoryScores plain_scores(const ReferenceTrajectory& trajectory, bool averages) {
  const auto& [logprobs, terms] = trajectory;
  const at::Tensor weight = terms.columns[0];
  at::Tensor score = at::dot(weight, logprobs);
  if (terms.columns.size() > 2) score = score - at::dot(weight, terms.columns[2]);
  if (averages) score = score / weight.sum();
  return {score, terms.coefficient[0] / weight[0], terms.columns[1][0]};
}

std::vector<TermColumn> Preference::columns() const {
  std::vector<TermColumn> columns{TermColumn::kWeight, TermColumn::kChosen};
  if (has_reference()) columns.push_back(TermColumn::kRefLogprob);
  return columns;
}

std::vector<Metric> Preference::metrics() const {
  return {{"chosen_reward", Reduction::kMeanOfUnits},
          {"rejected_reward", Reduction::kMeanOfUnits},
          {"reward_margin", Reduction::kMeanOfUnits},
          {"reward_accuracy", Reduction::kMeanOfUnits}};
}

ObjectiveValue Preference::value(const at::Tensor& logprobs, const TermTensors& terms,
                                 const TermUnits& units) const {
  const TrajectoryScores scores = trajectory_scores(logprobs, terms, units, averages());
  const auto by_pair = [&](const at::Tensor& values) {
    return at::zeros({units.num_groups}, values.options()).index_add(0, units.group, values);
  };
  const at::Tensor is_chosen = scores.chosen.gt(0.5);
  const at::Tensor chosen = by_pair(scores.score.masked_fill(is_chosen.logical_not(), 0));
  const at::Tensor rejected = by_pair(scores.score.masked_fill(is_chosen, 0));
  ObjectiveValue value{.loss = (by_pair(scores.share) * pair_losses(chosen, rejected)).sum(), .metrics = {}};
  const at::Tensor chosen_reward = options().beta * chosen.detach();
  const at::Tensor rejected_reward = options().beta * rejected.detach();
  value.metrics = {chosen_reward.sum(), rejected_reward.sum(), (chosen_reward - rejected_reward).sum(),
                   chosen_reward.gt(rejected_reward).sum()};
  return value;
}

at::Tensor Preference::reference(std::span<const ReferenceTrajectory> group) const {
  ESPALIER_ASSERT(group.size() == 2);
  const TrajectoryScores first = plain_scores(group[0], averages()),
                         second = plain_scores(group[1], averages());
  const bool first_is_chosen = first.chosen.item<double>() == 1;
  const at::Tensor loss = first_is_chosen ? plain_pair_loss(first.score, second.score)
                                          : plain_pair_loss(second.score, first.score);
  return ((first.share + second.share) * loss).unsqueeze(0);
}

TermBytes Preference::term_bytes() const {
  // Batch: the coefficient and the columns. Units: indices, log-probabilities and gradients.
  const auto num_columns = static_cast<int64_t>(columns().size());
  return {.batch = kTermIndexBytes + (1 + num_columns) * kTermRealBytes,
          .graph = 2 * kTermRealBytes + kTermIndexBytes,
          .running = 3 * kTermRealBytes};
}

}  // namespace espalier
