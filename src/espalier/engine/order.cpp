// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/order.h"

#include <algorithm>

namespace espalier {

std::vector<bool> micro_batches_with_readers(const Step& step, const std::vector<bool>& active) {
  std::vector<bool> result(active.size());
  for (size_t m = 0; m < active.size(); ++m) {
    const int64_t parent = step.plan.micro_batches[m].parent;
    if (active[m] && parent >= 0) result[parent] = true;
  }
  return result;
}

LossUnits loss_units(const Step& step, const Loss& loss) {
  const auto num_trajectories = static_cast<int64_t>(step.rows.size());
  LossUnits units;
  units.unit_of_trajectory = loss.units_of(step.rows);
  int64_t num_units = 0;
  for (const int64_t unit : units.unit_of_trajectory) num_units = std::max(num_units, unit + 1);
  units.trajectories.resize(num_units);
  units.micro_batches_of_unit.resize(num_units);
  for (int64_t k = 0; k < num_trajectories; ++k) units.trajectories[units.unit_of_trajectory[k]].push_back(k);
  const auto& micro_batches = step.plan.micro_batches;
  units.units_of_micro_batch.resize(micro_batches.size());
  for (size_t m = 0; m < micro_batches.size(); ++m) {
    for (const Placement& placement : micro_batches[m].trajectories) {
      const TermRange range = terms_of(step, micro_batches[m], placement);
      if (range.begin == range.end) continue;
      // Parts of a mix with token scope are not evaluated by unit.
      if (!loss.part(loss.part_of(step.rows[placement.trajectory])).is_wide()) continue;
      const int64_t unit = units.unit_of_trajectory[placement.trajectory];
      std::vector<int64_t>& members = units.micro_batches_of_unit[unit];
      if (!members.empty() && members.back() == static_cast<int64_t>(m)) continue;
      members.push_back(static_cast<int64_t>(m));
      units.units_of_micro_batch[m].push_back(unit);
    }
  }
  return units;
}

bool needs_logprob_pass(const Step& step, const LossUnits& units) {
  const std::vector<bool> active = micro_batches_with_loss(step);
  const std::vector<bool> with_readers = micro_batches_with_readers(step, active);
  const bool by_piece = step.plan.options.checkpoint_activations == CheckpointActivations::kPiece;
  std::vector<bool> known(active.size());
  bool needed = false;
  const auto leave = [&](int64_t m) {
    known[m] = true;  // recomputed if they were not kept
    for (const int64_t unit : units.units_of_micro_batch[m]) {
      const std::vector<int64_t>& members = units.micro_batches_of_unit[unit];
      needed |= !std::all_of(members.begin(), members.end(), [&](int64_t other) { return known[other]; });
    }
  };
  walk(step, active, [&](int64_t m) { known[m] = !(by_piece && with_readers[m]); }, leave);
  return needed;
}

bool needs_logprob_pass(const Step& step, const Loss& loss) {
  return loss.is_wide() && needs_logprob_pass(step, loss_units(step, loss));
}

bool needs_routing_pass(const Step& step, const Loss& loss) {
  if (loss.router_options().router_aux_loss_coef == 0) return false;
  if (step.whole.is_divided) return true;
  const auto& micro_batches = step.plan.micro_batches;
  for (int64_t m = 1; m < static_cast<int64_t>(micro_batches.size()); ++m) {
    if (micro_batches[m].parent != m - 1) return true;
  }
  return false;
}

}  // namespace espalier
