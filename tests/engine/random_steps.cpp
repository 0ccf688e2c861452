// SPDX-License-Identifier: Apache-2.0
#include "tests/engine/random_steps.h"

#include <algorithm>

#include <fmt/format.h>

namespace espalier::testing {

ObjectiveOptions random_objective(Rng& rng) {
  ObjectiveOptions objective;
  objective.kind = rng.below(2) == 0 ? ObjectiveKind::kSft : ObjectiveKind::kGrpo;
  objective.shared_targets = rng.below(3) == 0 ? SharedTargets::kOnce : SharedTargets::kSum;
  objective.normalize = static_cast<Normalize>(rng.below(3));
  objective.normalize_constant = 0.5 + 10 * rng.uniform();
  objective.clip_low = 0.5 * rng.uniform();
  objective.clip_high = 0.5 * rng.uniform();
  objective.scale_rewards = rng.below(2) == 0;
  return objective;
}

PlanOptions random_plan(Rng& rng, const Trajectories& trajectories) {
  PlanOptions plan;
  constexpr Strategy kStrategies[] = {Strategy::kPartition, Strategy::kPartition, Strategy::kTreePacking,
                                      Strategy::kSequencePacking};
  plan.strategy = kStrategies[rng.below(4)];
  plan.checkpoint_activations =
      static_cast<CheckpointActivations>(rng.below(plan.strategy == Strategy::kPartition ? 3 : 2));
  int64_t smallest = 1;
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    smallest = std::max(smallest, trajectories.row_size(row));
  }
  if (plan.strategy == Strategy::kPartition) {
    plan.offload_context = plan.checkpoint_activations == CheckpointActivations::kPiece && rng.below(2) == 0;
    smallest = rng.between(1, smallest);
  }
  // No limit, the smallest budget, or one between.
  const int64_t kind = rng.below(3);
  if (kind > 0) plan.token_budget = smallest + (kind == 1 ? 0 : rng.between(0, trajectories.num_tokens()));
  return plan;
}

std::string describe(const ObjectiveOptions& objective, const PlanOptions& plan, Family family, Shape shape) {
  return fmt::format("{} {} shared targets {} normalize {} {} budget {} checkpoints {} shape {}",
                     to_string(family), objective.kind == ObjectiveKind::kSft ? "sft" : "grpo",
                     objective.shared_targets == SharedTargets::kSum ? "sum" : "once",
                     static_cast<int>(objective.normalize), espalier::to_string(plan.strategy),
                     plan.token_budget, espalier::to_string(plan.checkpoint_activations),
                     static_cast<int>(shape));
}

}  // namespace espalier::testing
