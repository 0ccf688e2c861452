// SPDX-License-Identifier: Apache-2.0
// The order of forward and backward passes of the micro-batches of a plan.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/engine/step.h"
#include "espalier/objective/loss.h"

namespace espalier {

/// Visits the active micro-batches: enter (the forward pass) in the order of the plan, leave (the backward
/// pass) after all descendants have been left. `active`: by micro-batch, whether it runs.
template <class Enter, class Leave>
void walk(const Step& step, const std::vector<bool>& active, const Enter& enter, const Leave& leave) {
  const auto& micro_batches = step.plan.micro_batches;
  std::vector<int64_t> entered;
  const auto leave_until = [&](int64_t parent) {
    while (!entered.empty() && entered.back() != parent) {
      leave(entered.back());
      entered.pop_back();
    }
  };
  for (int64_t m = 0; m < static_cast<int64_t>(micro_batches.size()); ++m) {
    if (!active[m]) continue;
    leave_until(micro_batches[m].parent);
    enter(m);
    entered.push_back(m);
  }
  leave_until(-1);
}

/// By micro-batch: whether another active one reads its context.
std::vector<bool> micro_batches_with_readers(const Step& step, const std::vector<bool>& active);

/// The units on which a loss of wider scope than a token is evaluated: the terms of a trajectory, group or
/// pair, or of the step; in a mix, within a source. Losses of token scope have no units with terms.
struct LossUnits {
  std::vector<int64_t> unit_of_trajectory;                  // by trajectory of the step
  std::vector<std::vector<int64_t>> trajectories;           // by unit
  std::vector<std::vector<int64_t>> units_of_micro_batch;   // units with terms in it, each once
  std::vector<std::vector<int64_t>> micro_batches_of_unit;  // ascending
};
LossUnits loss_units(const Step& step, const Loss& loss);

/// Whether a separate pass must compute log-probabilities first, because not all terms of some unit are known
/// when the first of its micro-batches is left. Terms are known if their micro-batch has been entered and
/// keeps its log-probabilities (not if CheckpointActivations::kPiece recomputes them).
bool needs_logprob_pass(const Step& step, const LossUnits& units);
/// The same for a loss; false for token scope.
bool needs_logprob_pass(const Step& step, const Loss& loss);

/// Whether all forward passes must run first, because the loss has a load-balancing part and some backward
/// pass comes before the last forward pass, here or on another rank.
bool needs_routing_pass(const Step& step, const Loss& loss);

}  // namespace espalier
