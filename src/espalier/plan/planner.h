// Choosing a plan.
#pragma once

#include "espalier/plan/memory_model.h"
#include "espalier/plan/plan.h"
#include "espalier/plan/time_model.h"

namespace espalier {

/// What time and memory a model takes; plans are compared by it.
struct PlanCosts {
  TimeModel time;
  MemoryModel memory;
};

/// Of a plan's forward and backward passes: seconds, and the most bytes at a time.
struct PlanPrice {
  double seconds = 0;
  double bytes = 0;
};

/// What the plan is predicted to take, every token of every trajectory counted as if it carried loss.
PlanPrice price(const PlanCosts& costs, const Plan& plan);

/// Plans the whole forest:
///   tree-packing (tree_packing.h), sequence-packing (sequence_packing.h), partition (partition.h, merged the
///   cheaper way), or auto: the cheapest of the three by predicted time.
/// Activations are checkpointed as the options say, or (auto) as the cheapest plan has it.
/// Micro-batches hold at most token_budget tokens. Under a memory budget the largest token budget (and at
/// most the one given) is sought with which the predicted peak fits; a strategy tries some twenty at most.
/// Of the plans tried that fit the cheapest is taken. Deterministic for equal costs.
/// Throws InputError, naming the smallest budget that works (of memory the smallest tried): when a trajectory
/// is longer than the token budget of a packing strategy; when nothing fits the memory budget. Also for
/// negative budgets. An empty forest has no micro-batches.
Plan make_plan(const Forest& forest, const PlanOptions& options, const PlanCosts& costs);

/// Without a model: plans are compared for a decoder of common proportions. Refuses a memory budget.
Plan make_plan(const Forest& forest, const PlanOptions& options);

}  // namespace espalier
