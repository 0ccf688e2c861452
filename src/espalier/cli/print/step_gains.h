// SPDX-License-Identifier: Apache-2.0
// What steps gain by their plans.
#pragma once

#include "espalier/engine/step.h"
#include "espalier/inspect/gains.h"
#include "espalier/plan/loss_work.h"

namespace espalier::cli {

/// The FLOPs of some steps, summed.
struct StepFlops : LossFlops {
  void add(const ModelCost& model, const Step& step);
  Gains gains() const { return Gains::of(sequence_packing, append_only, plan, /*in_flops=*/true); }
};

/// By tokens: what the plan encodes, against the trajectories by themselves and merged.
Gains token_gains(const Forest& forest, const Plan& plan);

}  // namespace espalier::cli
