// SPDX-License-Identifier: Apache-2.0
// What `espalier plan` prints, as JSON: the plan, a comparison of the strategies, and the gains of steps.
#pragma once

#include <nlohmann/json.hpp>

#include <optional>
#include <string>
#include <vector>

#include "espalier/engine/step.h"
#include "espalier/engine/step_cost.h"
#include "espalier/inspect/report.h"
#include "espalier/plan/loss_work.h"

namespace espalier::commands {

/// The predicted cost of each candidate's plan, by index; nullopt for candidates without a plan. The step has
/// the chosen plan afterwards.
std::vector<std::optional<StepPrediction>> predict_candidates(const PlanCosts& costs, ComparedStep* compared);

struct PlanSummary {
  const Step* step = nullptr;
  const PlanComparison* plans = nullptr;
  PlanOptions asked{};                                          // as given by the flags
  std::vector<std::optional<StepPrediction>> predictions = {};  // by candidate; empty without a model
  bool calibrated = false;  // predictions use rates measured on this machine
  Gains gains{};
  std::optional<LossFlops> flops = {};  // of the chosen plan and without trees; nullopt without a model

  /// The prediction of the chosen plan; nullptr without a model.
  const StepPrediction* chosen_prediction() const;
  /// The plan and, under "comparison", every candidate.
  nlohmann::ordered_json json() const;
  /// What was asked for, and the rest of what the text says (python/espalier/printed/plan.py).
  nlohmann::ordered_json asked_json() const;
};

/// "partition, activations checkpointed by piece".
std::string way_text(const PlanOptions& way);

/// The sum of the FLOPs of several steps.
struct StepFlops : LossFlops {
  void add(const ModelCost& model, const Step& step);
  Gains gains() const { return Gains::of(sequence_packing, append_only, plan, /*in_flops=*/true); }
};

}  // namespace espalier::commands
