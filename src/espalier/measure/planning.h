// SPDX-License-Identifier: Apache-2.0
// Options and cost models with which a command or an engine plans its steps.
#pragma once

#include <functional>
#include <string>

#include "espalier/base/options.h"
#include "espalier/data/trajectories.h"
#include "espalier/plan/planner.h"

namespace espalier {

struct ModelUse;  // model_use.h

struct Planning {
  PlanOptions plan{.strategy = Strategy::kAuto, .checkpoint_activations = CheckpointActivations::kAuto};
  bool no_calibration = false;
  std::string cost_model;  // a file; empty: built-in rates

  /// `predicts`: also adds --no-calibration.
  void add(OptionList* list, bool predicts = true);
  /// With neither a token nor a memory budget, the token budget becomes the larger of kDefaultTokenBudget and
  /// the longest trajectory.
  PlanOptions options(const Trajectories& trajectories) const;
  /// The costs by which plans are compared. They never depend on measurements of this machine, so equal
  /// options and data give equal plans and bitwise identical results.
  PlanCosts costs(const ModelUse& use) const;
  /// The same with the time model used for predictions: rates measured on this device, unless
  /// --no-calibration. Measures, after calling `note`, if no calibration is cached.
  PlanCosts measured_costs(const ModelUse& use, const std::function<void(const std::string&)>& note) const;
  /// Removes the cached calibration and calls `note` if a step took much more or less time than predicted:
  /// the machine may have been busy during the calibration.
  void judge_calibration(const ModelUse& use, double predicted_seconds, double measured_seconds,
                         const std::function<void(const std::string&)>& note) const;
};

}  // namespace espalier
