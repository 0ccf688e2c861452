// SPDX-License-Identifier: Apache-2.0
// What espalier plan shows: a summary of the plan, and the strategies beside one another.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "espalier/engine/step.h"
#include "espalier/engine/step_cost.h"
#include "espalier/inspect/gains.h"
#include "espalier/plan/loss_work.h"

namespace espalier::cli {

/// What each candidate's plan is predicted to take as the step's plan, by index; nothing for those without a
/// plan. The step has the chosen plan afterwards.
std::vector<std::optional<StepPrediction>> predict_candidates(const PlanCosts& costs, ComparedStep* compared);

struct PlanSummary {
  const Step* step = nullptr;
  const PlanComparison* plans = nullptr;
  PlanOptions asked{};                                          // what the flags said
  std::vector<std::optional<StepPrediction>> predictions = {};  // by candidate; empty without a model
  bool calibrated = false;  // the predictions go by rates that were measured on this machine
  Gains gains{};
  std::optional<LossFlops> flops = {};  // of the chosen plan and without trees; none without a model

  /// Of the chosen plan; null without a model.
  const StepPrediction* chosen_prediction() const;
  /// The plan in a few lines, and a table of all strategies with a mark at the chosen one.
  std::string text() const;
  /// All of it, with each micro-batch and, under "comparison", each candidate.
  nlohmann::ordered_json json() const;
};

/// "partition, activations checkpointed by piece".
std::string way_text(const PlanOptions& way);

/// The memory budget that is at least these bytes, as --memory-budget takes it: "1229MiB".
std::string memory_budget_text(double bytes);

}  // namespace espalier::cli
