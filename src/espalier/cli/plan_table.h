// SPDX-License-Identifier: Apache-2.0
// How a plan is shown.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "espalier/engine/engine.h"
#include "espalier/inspect/gains.h"
#include "espalier/measure/cost.h"
#include "espalier/plan/plan.h"
#include "espalier/tree/forest.h"

namespace espalier::cli {

/// A table of the micro-batches (the first `max_rows`), with what is predicted of each, where given, and what
/// was measured, where a run has been. Totals follow.
struct PlanTable {
  const Forest* forest;
  const Plan* plan;
  const StepPrediction* prediction = nullptr;
  const StepResult* measured = nullptr;
  int64_t max_rows = 1000;

  std::string text() const;
};

/// Totals and, per micro-batch, tokens, pairs, trajectories, runs (begin, end, parent), parent micro-batch
/// and context runs; with a prediction its seconds and bytes.
nlohmann::ordered_json plan_json(const Forest& forest, const Plan& plan, const StepPrediction* prediction,
                                 const Gains& gains);

}  // namespace espalier::cli
