// SPDX-License-Identifier: Apache-2.0
#include "tests/objective/random_objective.h"

#include <fmt/format.h>

#include <algorithm>

#include "espalier/data/builder.h"

namespace espalier::testing {
namespace {

constexpr int64_t kNumObjectives = static_cast<int64_t>(ObjectiveKind::kOrpo) + 1;

}  // namespace

std::vector<std::string> objective_names() {
  std::vector<std::string> names;
  for (int64_t kind = 0; kind < kNumObjectives; ++kind) {
    names.emplace_back(to_string(static_cast<ObjectiveKind>(kind)));
  }
  return names;
}

ObjectiveOptions objective_named(const std::string& name) {
  ObjectiveOptions options;
  OptionList list;
  add_objective_options(&options, &list);
  list.set({{"objective", name}});
  return options;
}

ObjectiveOptions random_objective(Rng& rng) {
  return random_objective(rng, static_cast<ObjectiveKind>(rng.below(kNumObjectives)));
}

ObjectiveOptions random_objective(Rng& rng, ObjectiveKind kind) {
  ObjectiveOptions objective{.kind = kind};
  objective.shared_targets = rng.below(3) == 0 ? SharedTargets::kOnce : SharedTargets::kSum;
  objective.normalize = static_cast<Normalize>(rng.below(5));
  objective.normalize_constant = 0.5 + 10 * rng.uniform();
  objective.clip_low = 0.5 * rng.uniform();
  objective.clip_high = 0.5 * rng.uniform();
  objective.scale_rewards = rng.below(2) == 0;
  if (rng.below(3) == 0) objective.entropy_coef = 0.1 * rng.uniform();
  if (is_preference(kind)) {
    objective.shared_targets = SharedTargets::kSum;
    objective.normalize = rng.below(2) == 0 ? Normalize::kSequenceSum : Normalize::kConstant;
    // Where a loss is flat, its gradient is mostly the rounding of log-probabilities. kto is flat far from
    // its reference point, and random references are far away; ipo is flat at its target, 1 / (2 beta), which
    // random pairs would come close to.
    const bool is_flat_at_times = kind == ObjectiveKind::kKto || kind == ObjectiveKind::kIpo;
    objective.beta = (0.1 + rng.uniform()) * (is_flat_at_times ? 0.05 : 1);
    objective.margin = rng.uniform();
    objective.chosen_weight = 0.5 + rng.uniform();
    objective.rejected_weight = 0.5 + rng.uniform();
  }
  if (!is_policy_gradient(kind)) return objective;
  objective.baseline = rng.below(2) == 0 ? Baseline::kMean : Baseline::kLeaveOneOut;
  objective.turn_discount = rng.below(2) == 0 ? 1 : rng.uniform();
  const bool clips = kind == ObjectiveKind::kPpo || kind == ObjectiveKind::kGrpo ||
                     kind == ObjectiveKind::kDrGrpo || kind == ObjectiveKind::kDapo;
  if (clips && rng.below(2) == 0) objective.dual_clip = 1 + objective.clip_high + 2 * rng.uniform();
  if (rng.below(2) == 0) {
    objective.importance_weights = static_cast<ImportanceWeights>(rng.below(3));
    objective.importance_level = static_cast<ImportanceLevel>(rng.below(2));
    objective.importance_cap = 1 + 2 * rng.uniform();
    objective.importance_floor = rng.uniform();
  }
  if (rng.below(2) == 0) {
    objective.kl_coef = 0.1 * rng.uniform();
    objective.kl_estimator = static_cast<KlEstimator>(rng.below(3));
  }
  return objective;
}

Trajectories rows_for(const ObjectiveOptions& objective, const Trajectories& trajectories, Rng& rng) {
  if (!is_preference(objective.kind)) return trajectories;
  TrajectoriesBuilder builder;
  const int64_t num_pairs = std::max<int64_t>(1, trajectories.num_rows() / 2);
  std::vector<std::vector<int32_t>> chosen;
  for (int64_t k = 0; k < 2 * num_pairs; ++k) {
    const auto ids = trajectories.row(k % trajectories.num_rows());
    TrajectoryRow row{.input_ids = {ids.begin(), ids.end()},
                      .chosen = k < num_pairs,
                      .pair_id = fmt::format("pair {}", k % num_pairs)};
    if (row.input_ids.size() == 1) row.input_ids.push_back(1);
    if (k >= num_pairs && row.input_ids == chosen[k % num_pairs]) row.input_ids.push_back(0);
    chosen.push_back(row.input_ids);
    for (size_t t = 0; t < row.input_ids.size(); ++t) {
      row.loss_weights.push_back(0.25 + rng.uniform());
      row.ref_logprobs.push_back(t == 0 ? 0 : -0.5 - 2 * rng.uniform());
    }
    // Trajectories that only estimate the reference point.
    if (objective.kind == ObjectiveKind::kKto && k > 1 && rng.below(4) == 0) row.chosen.reset();
    builder.append(row);
  }
  return builder.finish();
}

std::string describe(const ObjectiveOptions& objective) {
  return objective_settings(objective).dump();
}

}  // namespace espalier::testing
