// SPDX-License-Identifier: Apache-2.0
// How the micro-batches of a plan are shown.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "espalier/engine/step_cost.h"
#include "espalier/engine/step_measures.h"
#include "espalier/plan/plan.h"
#include "espalier/tree/forest.h"

namespace espalier::cli {

/// "12.3 ms", "1.23 s".
std::string seconds_text(double seconds);

/// What checkpointing costs: "runs 2,345 tokens through the forward pass twice: about 12% more time". Empty
/// where nothing is computed again.
std::string recomputation(const Plan& plan);

/// The micro-batches (the first `max_rows`), with what is predicted of each, where given, and what was
/// measured, where a run has been.
struct PlanTable {
  const Forest* forest;
  const Plan* plan;
  const StepPrediction* prediction = nullptr;
  const StepMeasures* measured = nullptr;
  int64_t max_rows = 1000;

  /// One line per micro-batch, under a header.
  std::string rows() const;
  /// The rows, and totals below them.
  std::string text() const;
};

/// Per micro-batch tokens, pairs, trajectories, runs (begin, end, parent), parent micro-batch and context
/// runs; with a prediction its seconds and bytes.
nlohmann::ordered_json micro_batches_json(const Plan& plan, const StepPrediction* prediction);

}  // namespace espalier::cli
