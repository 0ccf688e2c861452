// SPDX-License-Identifier: Apache-2.0
// Choosing a plan.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

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
///   tree-packing (tree_packing.h), sequence-packing (sequence_packing.h), partition (partition.h, merged the
///   cheaper way), or auto: the cheapest of the three by predicted time.
/// Activations are checkpointed as the options say, or (auto) as the cheapest plan has it.
/// Micro-batches hold at most token_budget tokens. Under a memory budget, make_plan looks for the largest
/// token budget, at most the given one, with which the predicted peak fits. It tries about twenty per
/// strategy, and takes the cheapest of the plans that fit. Deterministic for equal costs. Throws InputError
/// if a trajectory is longer than the token budget of a packing strategy, if nothing fits the memory budget,
/// or if a budget is negative. The message names the smallest budget that works (for memory: the smallest
/// that was tried). An empty forest has no micro-batches.
Plan make_plan(const Forest& forest, const PlanOptions& options, const PlanCosts& costs);

/// Without a model: plans are compared for a decoder of common proportions. Refuses a memory budget.
Plan make_plan(const Forest& forest, const PlanOptions& options);

/// A way of planning, which is a strategy with a way of checkpointing, and what comes of it.
struct Candidate {
  PlanOptions options = {};       // the way, with the budgets as given; nothing is kAuto
  std::optional<Plan> plan = {};  // the fastest plan of this way that fits the budgets, if any does
  PlanPrice price = {};           // of the plan
  int64_t least_tokens = 0;       // this way's smallest token budget, where the given one is smaller; else 0
  double least_bytes = 0;         // under a memory budget: the least that a plan needs, of those tried
  double least_seconds = 0;       // under a memory budget: what plans take whose micro-batches are too large
                                  // to fit; smaller ones are not expected to take less
};

/// Every strategy, with every way of checkpointing that the options leave open.
struct PlanComparison {
  std::vector<Candidate> candidates;
  size_t chosen = 0;  // the candidate that has make_plan's plan
};

/// Told before each plan that is made: the way of planning, and the part of the comparison that is done.
using PlanProgress = std::function<void(const PlanOptions& way, double fraction)>;

/// What make_plan chooses from, and what it would choose under the other strategies. Throws as make_plan
/// does, so there is always a chosen plan. Takes longer than make_plan, which gives up what is too slow.
PlanComparison compare_plans(const Forest& forest, const PlanOptions& options, const PlanCosts& costs,
                             const PlanProgress& progress = {});

/// Without a model, as make_plan.
PlanComparison compare_plans(const Forest& forest, const PlanOptions& options,
                             const PlanProgress& progress = {});

}  // namespace espalier
