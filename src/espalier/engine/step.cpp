// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/step.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace espalier {

Forest forest_of(const Trajectories& trajectories, std::span<const int64_t> rows) {
  const std::vector<uint64_t> merge_keys = route_keys(trajectories);
  TokenSequences sequences;
  sequences.offsets = trajectories.offsets.span();
  sequences.tokens = trajectories.input_ids.span();
  sequences.merge_keys = merge_keys;
  sequences.release = trajectories.release;
  return build_forest(sequences, rows);
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

Step make_step(const Trajectories& trajectories, std::vector<int64_t> rows, const StepOptions& options) {
  RECORD_USER_SCOPE("plan");
  Step step;
  step.rows = std::move(rows);
  step.forest = forest_of(trajectories, step.rows);
  set_plan(&step, options.costs == nullptr ? make_plan(step.forest, options.plan)
                                           : make_plan(step.forest, options.plan, *options.costs));
  set_terms(trajectories, options, &step);
  return step;
}

Step make_step(const Trajectories& trajectories, const StepOptions& options) {
  return make_step(trajectories, all_rows(trajectories), options);
}

ComparedStep compare_step_plans(const Trajectories& trajectories, const StepOptions& options,
                                const PlanProgress& progress) {
  Step step;
  step.rows = all_rows(trajectories);
  step.forest = forest_of(trajectories, step.rows);
  PlanComparison plans = options.costs == nullptr
                             ? compare_plans(step.forest, options.plan, progress)
                             : compare_plans(step.forest, options.plan, *options.costs, progress);
  set_plan(&step, *plans.candidates[plans.chosen].plan);
  set_terms(trajectories, options, &step);
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

namespace {

/// Of each run of a micro-batch: the position of the first token of its path inside the micro-batch.
std::vector<int64_t> first_positions(const Forest& forest, const MicroBatch& micro_batch) {
  const std::vector<Run>& runs = micro_batch.runs;
  std::vector<int64_t> first(runs.size());
  for (size_t k = 0; k < runs.size(); ++k) {
    first[k] = runs[k].parent < 0 ? token_position(forest, runs[k].begin) : first[runs[k].parent];
  }
  return first;
}

}  // namespace

TermRange terms_of(const Step& step, const MicroBatch& micro_batch, const Placement& placement) {
  int64_t root = placement.run;
  while (micro_batch.runs[root].parent >= 0) root = micro_batch.runs[root].parent;
  // A token's term belongs to the token before it, whose hidden state predicts it.
  const int64_t first = token_position(step.forest, micro_batch.runs[root].begin) + 1;
  const int64_t end = token_position(step.forest, micro_batch.runs[placement.run].end - 1) + 2;
  const auto terms = step.terms.row(placement.trajectory);
  const int64_t offset = step.terms.offsets[placement.trajectory];
  return {offset + std::distance(terms.begin(), terms_from(terms, first).begin()),
          offset + std::distance(terms.begin(), terms_from(terms, end).begin())};
}

std::vector<bool> micro_batches_with_loss(const Step& step) {
  const auto& micro_batches = step.plan.micro_batches;
  std::vector<bool> result(micro_batches.size());
  for (int64_t m = static_cast<int64_t>(micro_batches.size()) - 1; m >= 0; --m) {
    const std::vector<int64_t> first_position = first_positions(step.forest, micro_batches[m]);
    for (const Placement& placement : micro_batches[m].trajectories) {
      const auto terms = step.terms.row(placement.trajectory);
      // A later term's edge starts here or below.
      if (!terms.empty() && terms.back().position > first_position[placement.run]) result[m] = true;
    }
  }
  return result;
}

}  // namespace espalier
