// SPDX-License-Identifier: Apache-2.0
// The cost of training low-rank adapters (config/lora.h) instead of the model.
#pragma once

#include "espalier/config/lora.h"
#include "espalier/plan/layer_cost.h"
#include "espalier/plan/memory_model.h"
#include "espalier/plan/planner.h"

namespace espalier {

/// `cost`, the result of model_cost(spec), with adapters on the targets and frozen weights. Activations that
/// are needed only for gradients of weights are no longer kept.
ModelCost with_adapters(ModelCost cost, const ModelSpec& spec, const LoraOptions& lora);

/// Likewise for all costs of plans. Adapters are in the precision of sums and have no master weights.
PlanCosts with_adapters(PlanCosts costs, const ModelSpec& spec, const LoraOptions& lora);

}  // namespace espalier
