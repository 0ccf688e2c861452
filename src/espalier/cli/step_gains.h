// SPDX-License-Identifier: Apache-2.0
// What steps gain by their plans.
#pragma once

#include "espalier/engine/batch.h"
#include "espalier/inspect/gains.h"
#include "espalier/plan/cost_model.h"

namespace espalier::cli {

/// FLOPs of forward and backward of some steps: by their plans, and of the same loss without trees. Without a
/// plan's recomputation of activations.
struct StepFlops {
  double plan = 0, packing = 0, append_only = 0;

  void add(const ModelCost& model, const Step& step);
  Gains gains() const { return Gains::of(packing, append_only, plan, /*in_flops=*/true); }
};

/// By tokens: what the plan encodes, against the trajectories by themselves and merged.
Gains token_gains(const Forest& forest, const Plan& plan);

}  // namespace espalier::cli
