// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/step.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "espalier/plan/loss_work.h"

namespace espalier {

Forest forest_of(const Trajectories& trajectories, std::span<const int64_t> rows, ChildOrder order,
                 std::span<const int64_t> tree_keys) {
  const std::vector<uint64_t> merge_keys = route_keys(trajectories);
  TokenSequences sequences;
  sequences.offsets = trajectories.offsets.span();
  sequences.tokens = trajectories.input_ids.span();
  sequences.merge_keys = merge_keys;
  sequences.tree_keys = tree_keys;
  sequences.release = trajectories.release;
  return build_forest(sequences, rows, order);
}

namespace {

void set_terms(const Trajectories& trajectories, const StepOptions& options, Step* step) {
  switch (options.terms) {
    case TermChoice::kAll:
      step->terms = all_terms(trajectories, step->rows);
      return;
    case TermChoice::kWithLossOrAll:
      step->terms = step_terms_or_all(trajectories, step->rows, step->forest, options.objective);
      return;
    case TermChoice::kWithLoss:
      if (!options.mix.empty()) {
        step->terms = mix_terms(trajectories, step->rows, step->forest, options.mix, &step->sharers);
        return;
      }
      step->terms = step_terms(trajectories, step->rows, step->forest, options.objective, &step->sharers);
      return;
  }
}

std::vector<int64_t> all_rows(const Trajectories& trajectories) {
  std::vector<int64_t> rows(trajectories.num_rows());
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

}  // namespace

Step unplanned_step(const Trajectories& trajectories, std::vector<int64_t> rows, const StepOptions& options) {
  Step step;
  step.rows = std::move(rows);
  std::vector<int64_t> keys;
  for (const auto& adapter : options.adapters) keys.push_back(reinterpret_cast<int64_t>(adapter.get()));
  step.forest = forest_of(trajectories, step.rows, options.child_order, keys);
  if (!keys.empty()) {
    for (const int64_t row : step.rows) step.adapters.push_back(options.adapters[row]);
  }
  set_terms(trajectories, options, &step);
  step.whole = {
      .rows = step.rows, .flat_tokens = step.flat_tokens(), .tree_tokens = step.forest.tree_tokens()};
  return step;
}

void plan_step(const StepOptions& options, Step* step) {
  set_plan(step, options.costs == nullptr ? make_plan(step->forest, options.plan)
                                          : make_plan(step->forest, options.plan, *options.costs));
}

Step make_step(const Trajectories& trajectories, std::vector<int64_t> rows, const StepOptions& options) {
  Step step = unplanned_step(trajectories, std::move(rows), options);
  plan_step(options, &step);
  return step;
}

Step make_step(const Trajectories& trajectories, const StepOptions& options) {
  return make_step(trajectories, all_rows(trajectories), options);
}

ComparedStep compare_step_plans(const Trajectories& trajectories, const StepOptions& options,
                                const PlanProgress& progress) {
  Step step = unplanned_step(trajectories, all_rows(trajectories), options);
  PlanComparison plans = options.costs == nullptr
                             ? compare_plans(step.forest, options.plan, progress)
                             : compare_plans(step.forest, options.plan, *options.costs, progress);
  set_plan(&step, *plans.candidates[plans.chosen].plan);
  return {std::move(step), std::move(plans)};
}

void set_plan(Step* step, Plan plan) {
  step->plan = std::move(plan);
  step->context = {};
  const ContextIndex index(step->plan.micro_batches);
  for (size_t m = 0; m < step->plan.micro_batches.size(); ++m) {
    step->context.push_row(context_blocks(index, static_cast<int64_t>(m)));
  }
  step->cuts = cut_runs(step->plan.micro_batches);
}

TermRange terms_of(const Step& step, const MicroBatch& micro_batch, const Placement& placement) {
  const PositionRange range = predicted_positions(step.forest, micro_batch, placement);
  const auto terms = step.terms.row(placement.trajectory);
  const int64_t offset = step.terms.offsets[placement.trajectory];
  return {offset + std::distance(terms.begin(), terms_from(terms, range.begin).begin()),
          offset + std::distance(terms.begin(), terms_from(terms, range.end).begin())};
}

std::vector<bool> micro_batches_with_loss(const Step& step) {
  std::vector<int64_t> last_position(step.terms.num_rows());
  for (int64_t k = 0; k < step.terms.num_rows(); ++k) {
    const auto terms = step.terms.row(k);
    last_position[k] = terms.empty() ? 0 : terms.back().position;
  }
  return micro_batches_with_loss(step.forest, step.plan, last_position);
}

}  // namespace espalier
