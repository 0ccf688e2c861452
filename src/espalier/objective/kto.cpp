// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <algorithm>

#include "espalier/objective/objective.h"
#include "espalier/objective/preference.h"

namespace espalier {
namespace {

/// Kahneman-Tversky optimisation: single trajectories labelled desirable or not (`chosen`), without pairs.
///   loss = sum over the trajectories of u * l,   s = sum over the terms of w (log p - log p_ref),
///   l = chosen_weight (1 - sigmoid(beta (s - z)))    of chosen trajectories,
///       rejected_weight (1 - sigmoid(beta (z - s)))  of rejected ones
/// (Ethayarajh et al., "KTO", 2024, equation 8). The reference point z, an estimate of the divergence from
/// the reference model, has no gradient: max(0, mean of s) over the trajectories of the step without `chosen`
/// (mismatched prompt-answer pairs, as in the paper; they contribute no loss), or over all if there are none.
/// The share u is coefficient / w; with the normaliser sequence-sum the loss is the mean over the
/// trajectories that have `chosen`.
///
/// Metrics of the step: reference_point (z), chosen_reward and rejected_reward (means of beta s; 0 if there
/// are none).
class Kto : public Objective {
 public:
  using Objective::Objective;
  Scope scope() const override { return Scope::kStep; }

  std::vector<TermColumn> columns() const override {
    return {TermColumn::kWeight, TermColumn::kChosen, TermColumn::kRefLogprob};
  }

  std::vector<Metric> metrics() const override {
    return {{"reference_point", Reduction::kMeanOfUnits},
            {"chosen_reward", Reduction::kMeanOfUnits},
            {"rejected_reward", Reduction::kMeanOfUnits}};
  }

  ObjectiveValue value(const at::Tensor& logprobs, const TermTensors& terms,
                       const TermUnits& units) const override {
    const TrajectoryScores scores = trajectory_scores(logprobs, terms, units, /*averages=*/false);
    // float64 masks: bool times float64 scalars would give float32.
    const at::Tensor is_chosen = scores.chosen.gt(0.5).to(at::kDouble);
    const at::Tensor is_free = scores.chosen.lt(-0.5).to(at::kDouble);
    const at::Tensor is_rejected = 1 - is_chosen - is_free;
    const auto masked_mean = [](const at::Tensor& values, const at::Tensor& flags) {
      return (values * flags).sum() / flags.sum().clamp_min(1);
    };
    const at::Tensor score = scores.score.detach();
    const at::Tensor point =
        at::where(is_free.sum().gt(0), masked_mean(score, is_free), score.mean()).clamp_min(0);
    const at::Tensor distance = options().beta * (scores.score - point);
    // exp(log_sigmoid(x)): the gradient of sigmoid(x) underflows where it is almost 1.
    const auto sigmoid = [](const at::Tensor& x) { return at::log_sigmoid(x).exp(); };
    const at::Tensor loss = is_chosen * options().chosen_weight * sigmoid(-distance) +
                            is_rejected * options().rejected_weight * sigmoid(distance);
    at::Tensor share = scores.share;
    if (options().normalize == Normalize::kSequenceSum) {
      share = share * (static_cast<double>(units.num_trajectories) / (1 - is_free).sum().clamp_min(1));
    }
    return {.loss = (share * loss).sum(),
            .metrics = {point, options().beta * masked_mean(score, is_chosen),
                        options().beta * masked_mean(score, is_rejected)}};
  }

  at::Tensor reference(std::span<const ReferenceTrajectory> group) const override {
    std::vector<TrajectoryScores> scores;
    double sum_of_all = 0, sum_of_free = 0, num_free = 0;
    for (const ReferenceTrajectory& trajectory : group) {
      scores.push_back(plain_scores(trajectory, /*averages=*/false));
      const double score = scores.back().score.item<double>();
      const bool is_free = scores.back().chosen.item<double>() == -1;
      sum_of_all += score;
      sum_of_free += is_free ? score : 0;
      num_free += is_free ? 1 : 0;
    }
    const auto num_all = static_cast<double>(group.size());
    const double point = std::max(0.0, num_free > 0 ? sum_of_free / num_free : sum_of_all / num_all);
    const bool is_mean = options().normalize == Normalize::kSequenceSum;
    std::vector<at::Tensor> addends;
    for (const auto& [score, share, chosen] : scores) {
      const double kind = chosen.item<double>();
      if (kind == -1) {
        addends.push_back(0 * score);
        continue;
      }
      const at::Tensor x = kind == 1 ? options().beta * (score - point) : options().beta * (point - score);
      const at::Tensor loss = at::exp(-at::logaddexp(at::zeros_like(x), x));  // 1 - sigmoid(x)
      const double weight = kind == 1 ? options().chosen_weight : options().rejected_weight;
      addends.push_back((is_mean ? 1 / (num_all - num_free) : share.item<double>()) * weight * loss);
    }
    return at::stack(addends);
  }

  TermBytes term_bytes() const override {
    return {.batch = kTermIndexBytes + 4 * kTermRealBytes,
            .graph = 2 * kTermRealBytes + kTermIndexBytes,
            .running = 3 * kTermRealBytes};
  }
};

}  // namespace

std::shared_ptr<const Objective> detail::make_kto(const ObjectiveOptions& options) {
  return std::make_shared<Kto>(options);
}

}  // namespace espalier
