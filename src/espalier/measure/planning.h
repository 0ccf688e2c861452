// SPDX-License-Identifier: Apache-2.0
// How a command or an engine plans its steps for a model: what it is asked for, and what plans are compared
// by.
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

  /// `predicts`: --no-calibration as well.
  void add(OptionList* list, bool predicts = true);
  /// Without a memory budget token budget 0 becomes kDefaultTokenBudget, or the longest trajectory if that is
  /// longer.
  PlanOptions options(const Trajectories& trajectories) const;
  /// What plans for a model are compared by. It never depends on a measurement of this machine, so equal
  /// options and data give equal plans, and equal plans equal bits, however busy the machine is.
  PlanCosts costs(const ModelUse& use) const;
  /// The same with the time model that predictions are made by: rates measured on this device, unless
  /// --no-calibration. Measures when no calibration is kept, and tells `note`.
  PlanCosts measured_costs(const ModelUse& use, const std::function<void(const std::string&)>& note) const;
  /// Forgets the kept calibration where a step took much more or less time than it predicts, and tells
  /// `note`: it may have been measured while the machine was at something else.
  void judge_calibration(const ModelUse& use, double predicted_seconds, double measured_seconds,
                         const std::function<void(const std::string&)>& note) const;
};

}  // namespace espalier
