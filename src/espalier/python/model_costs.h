// SPDX-License-Identifier: Apache-2.0
// The costs of a model as Python holds them.
#pragma once

#include <string>

#include "espalier/plan/planner.h"

namespace espalier::python {

/// What a model takes by its config.json, at built-in rates or at those of a file.
struct ModelCosts {
  std::string model_type;
  TimeModel time;

  PlanCosts plan_costs() const { return {time, {.cost = time.cost}}; }
};

}  // namespace espalier::python
