// SPDX-License-Identifier: Apache-2.0
// Base of objectives that compare a chosen with a rejected trajectory.
//   loss = sum over the pairs of u * l(C, R)
// C and R are the scores of the chosen and of the rejected trajectory: the sum (or mean) over its terms of w
// log p, minus the same of the reference model if the objective uses one, with loss weights w. The share u of
// a pair is the sum over both of coefficient / w, which is the same for all terms of a trajectory:
// 1 / (number of pairs) with the normaliser sequence-sum, and 2 / N with a number N.
#pragma once

#include "espalier/objective/objective.h"

namespace espalier {

/// Metrics, means over the pairs: chosen_reward and rejected_reward (beta times the scores), reward_margin
/// (their difference), reward_accuracy (how often the chosen one is larger).
class Preference : public Objective {
 public:
  using Objective::Objective;
  Scope scope() const final { return Scope::kPair; }
  std::vector<TermColumn> columns() const final;
  std::vector<Metric> metrics() const final;
  ObjectiveValue value(const at::Tensor& logprobs, const TermTensors& terms,
                       const TermUnits& units) const final;
  at::Tensor reference(std::span<const ReferenceTrajectory> group) const final;
  TermBytes term_bytes() const final;

 protected:
  virtual bool has_reference() const { return false; }
  /// Whether scores are means over the terms instead of sums.
  virtual bool averages() const { return false; }
  /// l of each pair [G], from scores [G].
  virtual at::Tensor pair_losses(const at::Tensor& chosen, const at::Tensor& rejected) const = 0;
  /// l of one pair, scalars, implemented independently for reference().
  virtual at::Tensor plain_pair_loss(const at::Tensor& chosen, const at::Tensor& rejected) const = 0;
};

/// The objective of this kind (preference_objectives.cpp); null if it compares no pairs.
std::shared_ptr<const Objective> make_preference(const ObjectiveOptions& options);

/// Scores of N trajectories, coefficient / w, and `chosen`; [N] each.
struct TrajectoryScores {
  at::Tensor score, share, chosen;
};
/// terms.columns: kWeight, kChosen and optionally kRefLogprob.
TrajectoryScores trajectory_scores(const at::Tensor& logprobs, const TermTensors& terms,
                                   const TermUnits& units, bool averages);

/// The same for one trajectory, scalars, implemented independently for reference().
TrajectoryScores plain_scores(const ReferenceTrajectory& trajectory, bool averages);

}  // namespace espalier
