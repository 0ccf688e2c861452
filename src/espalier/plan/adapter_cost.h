// SPDX-License-Identifier: Apache-2.0
// What training low-rank adapters (config/lora.h) costs in place of training the model.
#pragma once

#include "espalier/config/lora.h"
#include "espalier/plan/layer_cost.h"
#include "espalier/plan/memory_model.h"
#include "espalier/plan/planner.h"

namespace espalier {

/// `cost`, which is model_cost(spec), with adapters of the targets and frozen weights. What a layer keeps for
/// the gradients of weights alone it no longer keeps.
ModelCost with_adapters(ModelCost cost, const ModelSpec& spec, const LoraOptions& lora);

/// The same of all that plans are compared and predicted by. Adapters are in the precision of sums and have
/// no master weights.
PlanCosts with_adapters(PlanCosts costs, const ModelSpec& spec, const LoraOptions& lora);

}  // namespace espalier
