// SPDX-License-Identifier: Apache-2.0
// What is said of a step that has run.
#pragma once

#include <nlohmann/json.hpp>

#include "espalier/engine/engine.h"
#include "espalier/objective/options.h"
#include "espalier/plan/cost_model.h"

namespace espalier {

/// Loss, tokens, rates, memory, micro-batches, and what objective and routers sum up, by the names of
/// metrics.jsonl. `seconds`: what the step took.
nlohmann::ordered_json step_metrics(const ModelCost& model, const ObjectiveOptions& objective,
                                    const StepResult& result, double seconds);

}  // namespace espalier
