// SPDX-License-Identifier: Apache-2.0
#include "tests/engine/random_steps.h"

#include <algorithm>

#include <fmt/format.h>

#include "tests/objective/random_objective.h"

namespace espalier::testing {

Trajectories random_rows_for(ObjectiveOptions* objective, Rng& rng, Shape shape, int vocab_size) {
  const bool reads_policies = is_policy_gradient(objective->kind) || objective->kind == ObjectiveKind::kOpd;
  Trajectories rows =
      rows_for(*objective,
               random_trajectories(rng, shape, {.vocab_size = vocab_size, .for_grpo = reads_policies}), rng);
  if (!rows.logprobs.any()) objective->importance_weights = ImportanceWeights::kNone;  // of nothing
  return rows;
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
  return fmt::format("{} {} {} budget {} checkpoints {} shape {}", to_string(family), describe(objective),
                     espalier::to_string(plan.strategy), plan.token_budget,
                     espalier::to_string(plan.checkpoint_activations), static_cast<int>(shape));
}

}  // namespace espalier::testing
