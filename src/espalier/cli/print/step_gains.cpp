// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/print/step_gains.h"

#include "espalier/engine/step_cost.h"
#include "espalier/tree/statistics.h"

namespace espalier::cli {

void StepFlops::add(const ModelCost& model, const Step& step) {
  *this += loss_flops(model, step.forest, step.plan, loss_positions(step));
}

Gains token_gains(const Forest& forest, const Plan& plan) {
  const ForestStatistics statistics = forest_statistics(forest);
  return Gains::of(static_cast<double>(statistics.flat_tokens),
                   static_cast<double>(statistics.append_only_tokens), static_cast<double>(plan.num_tokens()),
                   /*in_flops=*/false);
}

}  // namespace espalier::cli
