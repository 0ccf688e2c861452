// SPDX-License-Identifier: Apache-2.0
// Metrics of a step.
#pragma once

#include <nlohmann/json.hpp>

#include "espalier/engine/engine.h"
#include "espalier/objective/options.h"
#include "espalier/plan/cost_model.h"

namespace espalier {

/// Loss, tokens, rates, memory, micro-batches, and metrics of objective and routers, by the names of
/// metrics.jsonl. `seconds`: duration of the step.
nlohmann::ordered_json step_metrics(const ModelCost& model, const ObjectiveOptions& objective,
                                    const StepResult& result, double seconds);

}  // namespace espalier
