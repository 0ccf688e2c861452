// Making plans.
#pragma once

#include "espalier/plan/plan.h"

namespace espalier {

/// Plans the whole forest by tree packing (tree_packing.h) or sequence packing (sequence_packing.h). Every
/// trajectory is placed exactly once; no micro-batch exceeds the budget; deterministic.
/// Throws InputError when a single trajectory is longer than the budget, naming it and the smallest budget
/// that works, and when the budget is negative. An empty forest has no micro-batches.
Plan make_plan(const Forest& forest, const PlanOptions& options);

}  // namespace espalier
