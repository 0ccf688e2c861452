// SPDX-License-Identifier: Apache-2.0
#include "tests/engine/random_steps.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "tests/objective/random_objective.h"

namespace espalier::testing {

namespace {

/// `topk` different tokens for each token but the first ones, with probabilities that sum to less than 1.
void add_ref_topk(Rng& rng, int64_t topk, int vocab_size, Trajectories* rows) {
  std::vector<int32_t> ids(rows->num_tokens() * topk, -1);
  std::vector<double> logprobs(ids.size());
  for (int64_t row = 0; row < rows->num_rows(); ++row) {
    for (int64_t token = rows->offsets[row] + 1; token < rows->offsets[row + 1]; ++token) {
      const int64_t first = rng.below(vocab_size);
      for (int64_t k = 0; k < topk; ++k) {
        ids[token * topk + k] = static_cast<int32_t>((first + k) % vocab_size);
        logprobs[token * topk + k] = std::log((0.05 + 0.9 * rng.uniform()) / static_cast<double>(topk));
      }
    }
  }
  rows->ref_topk_ids = Column<int32_t>(std::move(ids));
  rows->ref_topk_logprobs = Column<double>(std::move(logprobs));
  rows->ref_topk = topk;
}

/// Temperatures of half of the rows, of which some are equal and some say nothing.
void add_temperatures(Rng& rng, Trajectories* rows) {
  constexpr double kTemperatures[] = {0.5, 0.7, 1, 1.6, 0};
  std::vector<double> values;
  std::vector<uint8_t> present;
  for (int64_t row = 0; row < rows->num_rows(); ++row) {
    present.push_back(rng.below(2) == 0);
    values.push_back(present.back() != 0 ? kTemperatures[rng.below(std::size(kTemperatures))] : 0);
  }
  if (std::ranges::count(present, 1) == 0) return;
  rows->temperature = {Column<double>(std::move(values)), Column<uint8_t>(std::move(present))};
}

}  // namespace

Trajectories random_rows_for(ObjectiveOptions* objective, Rng& rng, Shape shape, int vocab_size) {
  const bool reads_policies = is_policy_gradient(objective->kind) || objective->kind == ObjectiveKind::kOpd;
  Trajectories rows =
      rows_for(*objective,
               random_trajectories(rng, shape, {.vocab_size = vocab_size, .for_grpo = reads_policies}), rng);
  if (objective->kind == ObjectiveKind::kOpd && rng.below(3) > 0) {
    objective->ref_topk = rng.below(2) == 0 ? RefTopk::kRest : RefTopk::kRenormalize;
    // One token alone, renormalised, has the probability 1 on both sides: a loss of nothing but roundings.
    const int least = objective->ref_topk == RefTopk::kRenormalize ? 2 : 1;
    add_ref_topk(rng, rng.between(least, std::min(vocab_size, 6)), vocab_size, &rows);
  }
  if (!rows.logprobs.any()) objective->importance_weights = ImportanceWeights::kNone;  // of nothing
  if (rng.below(2) == 0) add_temperatures(rng, &rows);
  return rows;
}

PlanOptions random_plan(Rng& rng, const Trajectories& trajectories) {
  PlanOptions plan;
  constexpr Strategy kStrategies[] = {Strategy::kPartition, Strategy::kPartition, Strategy::kTreePacking,
                                      Strategy::kAppendOnly, Strategy::kSequencePacking};
  plan.strategy = kStrategies[rng.below(std::size(kStrategies))];
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
