// SPDX-License-Identifier: Apache-2.0
// The gains of steps from their plans.
#pragma once

#include "espalier/engine/step.h"
#include "espalier/inspect/gains.h"
#include "espalier/plan/loss_work.h"

namespace espalier::cli {

/// The sum of the FLOPs of several steps.
struct StepFlops : LossFlops {
  void add(const ModelCost& model, const Step& step);
  Gains gains() const { return Gains::of(sequence_packing, append_only, plan, /*in_flops=*/true); }
};

/// Gains in tokens: those that the plan encodes, against sequence packing and append-only merging.
Gains token_gains(const Forest& forest, const Plan& plan);

}  // namespace espalier::cli
