// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "espalier/plan/planner.h"

namespace espalier::python {

/// The costs of a model by its config.json, at built-in rates or those of a file.
struct ModelCosts {
  std::string model_type;
  TimeModel time;

  PlanCosts plan_costs() const { return {time, {.cost = time.cost}}; }
};

}  // namespace espalier::python
