// SPDX-License-Identifier: Apache-2.0
// Tables of the micro-batches of a plan.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "espalier/engine/step_cost.h"
#include "espalier/plan/plan.h"
#include "espalier/tree/forest.h"

namespace espalier::cli {

/// "12.3 ms", "1.23 s".
std::string seconds_text(double seconds);

/// The cost of checkpointing: "runs 2,345 tokens through the forward pass twice: about 12% more time". Empty
/// if nothing is recomputed.
std::string recomputation(const Plan& plan);

/// The first `max_rows` micro-batches, with predictions and measurements if given.
struct PlanTable {
  const Forest* forest;
  const Plan* plan;
  const StepPrediction* prediction = nullptr;
  const StepMeasures* measured = nullptr;
  int64_t max_rows = 1000;

  /// A header and one line per micro-batch.
  std::string rows() const;
  /// The rows, followed by totals.
  std::string text() const;
};

/// Per micro-batch: tokens, pairs, trajectories, runs (begin, end, parent), parent micro-batch and context
/// runs; with a prediction also seconds and bytes.
nlohmann::ordered_json micro_batches_json(const Plan& plan, const StepPrediction* prediction);

}  // namespace espalier::cli
