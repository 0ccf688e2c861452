// SPDX-License-Identifier: Apache-2.0
// Chooses a plan.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "espalier/config/lora.h"
#include "espalier/plan/memory_model.h"
#include "espalier/plan/plan.h"
#include "espalier/plan/time_model.h"

namespace espalier {

/// The models of time and memory by which plans are compared.
struct PlanCosts {
  TimeModel time;
  MemoryModel memory;
};

/// Predicted seconds of a plan's forward and backward passes, and the peak of its bytes.
struct PlanPrice {
  double seconds = 0;
  double bytes = 0;
};

/// The predicted price of a plan, as if every token of every trajectory carried loss.
PlanPrice price(const PlanCosts& costs, const Plan& plan);

/// Plans the whole forest:
///   tree-packing, append-only and sequence-packing (packing.h), partition (partition.h, merged the
///   cheaper way), or auto: the cheapest of all but append-only by predicted time.
/// Activations are checkpointed as the options say, or (auto) as in the cheapest plan. Micro-batches hold at
/// most token_budget tokens. Under a memory budget, make_plan searches for the largest token budget, at most
/// the given one, with which the predicted peak fits. It tries about twenty per strategy, and returns the
/// cheapest of the plans that fit. Deterministic for equal costs. Throws InputError if a trajectory is longer
/// than the token budget of a packing strategy, if nothing fits the memory budget, or if a budget is
/// negative. The message names the smallest budget that works (for memory: the smallest that was tried). An
/// empty forest has no micro-batches.
Plan make_plan(const Forest& forest, const PlanOptions& options, const PlanCosts& costs);

/// Without a model: plans are compared for a decoder of common proportions. Refuses a memory budget.
Plan make_plan(const Forest& forest, const PlanOptions& options);

/// A combination of strategy and checkpointing, and its best plan.
struct Candidate {
  PlanOptions options = {};       // nothing is kAuto; budgets as given
  std::optional<Plan> plan = {};  // the fastest plan that fits the budgets, if any does
  PlanPrice price = {};           // of the plan
  int64_t least_tokens = 0;       // the smallest possible token budget, if the given one is smaller; else 0
  double least_bytes = 0;         // under a memory budget: the fewest bytes of any plan that was tried
  double least_seconds = 0;  // under a memory budget: the time of plans whose micro-batches are too large
                             // to fit; smaller micro-batches are not expected to take less
};

/// Every strategy, append-only if it was asked for, with every checkpointing that the options allow.
struct PlanComparison {
  std::vector<Candidate> candidates;
  size_t chosen = 0;  // the candidate that has make_plan's plan
};

/// Called before each plan is made, with its strategy and checkpointing and the finished fraction of the
/// comparison.
using PlanProgress = std::function<void(const PlanOptions& way, double fraction)>;

/// The candidates of make_plan, and those of other strategies. Throws like make_plan, so there is always a
/// chosen plan. Takes longer than make_plan, which stops searching candidates that are too slow.
PlanComparison compare_plans(const Forest& forest, const PlanOptions& options, const PlanCosts& costs,
                             const PlanProgress& progress = {});

/// Likewise without a model.
PlanComparison compare_plans(const Forest& forest, const PlanOptions& options,
                             const PlanProgress& progress = {});

/// The costs of a decoder of half a billion parameters and common proportions, at assumed rates.
PlanCosts common_costs();

/// `cost`, the result of model_cost(spec), with low-rank adapters (config/lora.h) on the targets and frozen
/// weights. Activations that are needed only for gradients of weights are no longer kept.
ModelCost with_adapters(ModelCost cost, const ModelSpec& spec, const LoraOptions& lora);

/// Likewise for all costs of plans. Adapters are in the precision of sums and have no master weights.
PlanCosts with_adapters(PlanCosts costs, const ModelSpec& spec, const LoraOptions& lora);

}  // namespace espalier
