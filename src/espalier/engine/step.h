// SPDX-License-Identifier: Apache-2.0
// An optimiser step as a value: trajectories, forest, plan and loss terms.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "espalier/base/csr.h"
#include "espalier/data/trajectories.h"
#include "espalier/objective/mix.h"
#include "espalier/objective/options.h"
#include "espalier/objective/terms.h"
#include "espalier/plan/context.h"
#include "espalier/plan/division.h"
#include "espalier/plan/planner.h"

namespace espalier {

class Group;

namespace accumulating {
struct AdapterMaps;  // model/row_adapters.h
}

/// The input of one optimiser step: trajectories, their forest, the plan, and the loss terms.
struct Step {
  std::vector<int64_t> rows;  // rows of the data; trajectory k of the step is rows[k]
  Forest forest;
  Plan plan;
  Csr<ContextBlock> context;  // row m: context that micro-batch m reads
  Csr<int64_t> cuts;          // row m: the runs of micro-batch m that others continue, ascending
  Csr<Term> terms;
  Csr<int64_t> sharers;  // row i: the trajectories that share term i; empty with SharedTargets::kSum
  std::vector<std::shared_ptr<const accumulating::AdapterMaps>> adapters{};  // [num_trajectories] or empty

  /// The step of all ranks, of which this is the share of one (share.h).
  struct Whole {
    std::vector<int64_t> rows;
    int64_t flat_tokens = 0, tree_tokens = 0;
    bool is_divided = false;  // over several ranks
    std::string digest{};     // of its rows, terms and shares
  };
  Whole whole;

  /// The ranks that compute every micro-batch together, each a part of its tokens (share.h); null: this
  /// process alone.
  const Group* context_group = nullptr;
  std::vector<TokenDivision> divisions{};  // by micro-batch; empty without a group
  std::string divisions_digest{};          // of the plan and its divisions

  int64_t flat_tokens() const { return forest.flat_tokens(); }
};

/// Selects the tokens that are terms of a step.
enum class TermChoice {
  kWithLoss,       // tokens with loss; InputError if there are none
  kWithLossOrAll,  // tokens with loss, or all if there are none, for counts of data without loss
  kAll,            // every token but the first of each row, with coefficient 1
};

struct StepOptions {
  PlanOptions plan{};
  ObjectiveOptions objective{};      // shared targets and normaliser of the terms
  const PlanCosts* costs = nullptr;  // costs for comparing plans (make_plan); null: of a typical decoder
  TermChoice terms = TermChoice::kWithLoss;
  ChildOrder child_order = ChildOrder::kFirstReached;
  /// The sources of a mix, used in place of `objective` with TermChoice::kWithLoss.
  std::span<const MixSource> mix{};
  /// By row of the data: its adapter. Rows of different adapters share nothing. Empty: none.
  std::span<const std::shared_ptr<const accumulating::AdapterMaps>> adapters{};
  const Group* context_group = nullptr;  // make_share: as Step::context_group
};

/// Builds forest, plan and terms of the given rows. Tokens with different recorded routes are not shared.
/// Steps are only made by this function, its overload, make_share and compare_step_plans.
Step make_step(const Trajectories& trajectories, std::vector<int64_t> rows, const StepOptions& options);

/// The same for all rows.
Step make_step(const Trajectories& trajectories, const StepOptions& options);

/// make_step in two parts: everything but the plan, and the plan by options.plan and options.costs.
Step unplanned_step(const Trajectories& trajectories, std::vector<int64_t> rows, const StepOptions& options);
void plan_step(const StepOptions& options, Step* step);

/// A step, and the candidates from which its plan was chosen.
struct ComparedStep {
  Step step;
  PlanComparison plans;
};

/// The step of all rows that make_step makes, with all candidates compared by compare_plans.
ComparedStep compare_step_plans(const Trajectories& trajectories, const StepOptions& options,
                                const PlanProgress& progress = {});

/// Sets the plan of the step and everything derived from it.
void set_plan(Step* step, Plan plan);

/// The forest of the given rows of the data; all if empty. `tree_keys`: of TokenSequences, by row of the
/// data.
Forest forest_of(const Trajectories& trajectories, std::span<const int64_t> rows,
                 ChildOrder order = ChildOrder::kFirstReached, std::span<const int64_t> tree_keys = {});

/// The terms of the trajectory of a placement whose edges start in its micro-batch, as a range of
/// Step::terms.values.
struct TermRange {
  int64_t begin, end;
};
TermRange terms_of(const Step& step, const MicroBatch& micro_batch, const Placement& placement);

/// By micro-batch: whether it or a descendant has an edge with loss. Others need not run.
std::vector<bool> micro_batches_with_loss(const Step& step);

}  // namespace espalier
