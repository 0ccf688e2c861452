// SPDX-License-Identifier: Apache-2.0
// The order in which the micro-batches of a plan run.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/engine/step.h"
#include "espalier/objective/loss.h"

namespace espalier {

/// Visits the micro-batches that run, those with loss in them or below: enter (the forward pass) in the order
/// of the plan, leave (the backward pass) after all descendants have been left.
template <class Enter, class Leave>
void walk(const Step& step, const std::vector<bool>& runs, const Enter& enter, const Leave& leave) {
  const auto& micro_batches = step.plan.micro_batches;
  std::vector<int64_t> entered;
  const auto leave_until = [&](int64_t parent) {
    while (!entered.empty() && entered.back() != parent) {
      leave(entered.back());
      entered.pop_back();
    }
  };
  for (int64_t m = 0; m < static_cast<int64_t>(micro_batches.size()); ++m) {
    if (!runs[m]) continue;
    leave_until(micro_batches[m].parent);
    enter(m);
    entered.push_back(m);
  }
  leave_until(-1);
}

/// Of each micro-batch: does another one that runs inherit from it?
std::vector<bool> micro_batches_with_readers(const Step& step, const std::vector<bool>& runs);

/// What a loss of a scope wider than a token is evaluated on at a time: the terms of a trajectory, a group, a
/// pair or the step; in a mix, of a source's. Losses of token scope have no units with terms.
struct LossUnits {
  std::vector<int64_t> unit_of_trajectory;             // of the step
  std::vector<std::vector<int64_t>> trajectories;      // of each unit
  std::vector<std::vector<int64_t>> of_micro_batch;    // units that have terms in it, each once
  std::vector<std::vector<int64_t>> micro_batches_of;  // of each unit, ascending
};
LossUnits loss_units(const Step& step, const Loss& loss);

/// Whether some unit's terms are not all known when the first of its micro-batches is left. Then the step has
/// to compute log-probabilities in a pass of its own before it can train. They are all known where every
/// micro-batch with terms of the unit has been entered by then, and keeps the log-probabilities of its
/// forward pass (those that CheckpointActivations::kPiece runs again do not).
bool needs_logprob_pass(const Step& step, const LossUnits& units);
/// The same of a loss; never where its scope is a token.
bool needs_logprob_pass(const Step& step, const Loss& loss);

/// Whether a model with routers has to run all forward passes before it can train, because the loss has a
/// load-balancing part and some backward pass comes before the last forward pass.
bool needs_routing_pass(const Step& step, const Loss& loss);

}  // namespace espalier
