// SPDX-License-Identifier: Apache-2.0
// Tables of the micro-batches of a plan.
#pragma once

#include <limits>
#include <string>

#include <nlohmann/json.hpp>

#include "espalier/engine/step_cost.h"
#include "espalier/plan/plan.h"

namespace espalier::commands {

/// Tokens that checkpointing runs through the forward pass twice.
int64_t recomputed_tokens(const Plan& plan);

/// Per micro-batch, of the first `most`: tokens, pairs, trajectories, runs (begin, end, parent), parent
/// micro-batch and context runs; with a prediction also seconds and bytes.
nlohmann::ordered_json micro_batches_json(const Plan& plan, const StepPrediction* prediction,
                                          int64_t most = std::numeric_limits<int64_t>::max());

/// What espalier.printed makes a table of: totals, and the first micro-batches, with predictions and
/// measurements if given.
nlohmann::ordered_json table_json(const Step& step, const StepPrediction* prediction,
                                  const StepMeasures* measured = nullptr, int64_t max_rows = 1000);

}  // namespace espalier::commands
