// SPDX-License-Identifier: Apache-2.0
// The costs by which plans are compared if no model is known.
#pragma once

#include "espalier/plan/planner.h"

namespace espalier {

/// The costs of a decoder of half a billion parameters and common proportions, at assumed rates.
PlanCosts common_costs();

}  // namespace espalier
