// SPDX-License-Identifier: Apache-2.0
// One optimiser step as a value: what is trained on, how it is cut, and which tokens carry loss.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/base/csr.h"
#include "espalier/data/trajectories.h"
#include "espalier/objective/mix.h"
#include "espalier/objective/options.h"
#include "espalier/objective/terms.h"
#include "espalier/plan/context.h"
#include "espalier/plan/planner.h"

namespace espalier {

/// What one optimiser step works on: the trajectories, their forest, how it is cut, and the loss terms.
struct Step {
  std::vector<int64_t> rows;  // trajectories, as rows of the data; everything below counts in positions here
  Forest forest;
  Plan plan;
  Csr<ContextBlock> context;  // row m: what micro-batch m reads of its ancestors
  Csr<int64_t> cuts;          // row m: the runs of micro-batch m that others continue, ascending
  Csr<Term> terms;
  Csr<int64_t>
      sharers;  // row i: the trajectories that term i of all stands for; empty with SharedTargets::kSum

  int64_t flat_tokens() const { return forest.flat_tokens(); }
};

/// Which tokens are terms of a step.
enum class TermChoice {
  kWithLoss,       // those that carry loss; InputError where none does
  kWithLossOrAll,  // the same, or all where none does: data without loss can be counted
  kAll,            // every token but the first ones, with coefficient 1
};

struct StepOptions {
  PlanOptions plan{};
  ObjectiveOptions objective{};  // shared targets and normaliser of the terms
  const PlanCosts* costs =
      nullptr;  // that plans are compared by (make_plan); null: those of a common decoder
  TermChoice terms = TermChoice::kWithLoss;
  /// The sources of a mix, in place of `objective`; read with TermChoice::kWithLoss.
  std::span<const MixSource> mix{};
};

/// Builds forest, plan and terms of the given rows of the data. Recorded expert routes that differ are not
/// shared. A Step is made by this function, its overload and compare_step_plans only.
Step make_step(const Trajectories& trajectories, std::vector<int64_t> rows, const StepOptions& options);

/// The same of all rows.
Step make_step(const Trajectories& trajectories, const StepOptions& options);

/// A step, and the ways of planning from which its plan was chosen.
struct ComparedStep {
  Step step;
  PlanComparison plans;
};

/// The same step of all rows as make_step, made by compare_plans. `progress`: of the comparison.
ComparedStep compare_step_plans(const Trajectories& trajectories, const StepOptions& options,
                                const PlanProgress& progress = {});

/// Makes `plan` that of the step.
void set_plan(Step* step, Plan plan);

/// Forest of the given rows of the data (all when empty).
Forest forest_of(const Trajectories& trajectories, std::span<const int64_t> rows);

/// The terms of a placement's trajectory whose edge starts in the placement's micro-batch, as a range of
/// Step::terms.values.
struct TermRange {
  int64_t begin, end;
};
TermRange terms_of(const Step& step, const MicroBatch& micro_batch, const Placement& placement);

/// Of each micro-batch of the plan: does it, or a descendant, have an edge that carries loss? Others need not
/// run.
std::vector<bool> micro_batches_with_loss(const Step& step);

}  // namespace espalier
