// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/units.h"
#include "espalier/plan/context.h"
#include "espalier/plan/plan.h"
#include "espalier/plan/planner.h"
#include "espalier/python/arrays.h"
#include "espalier/python/bindings.h"
#include "espalier/python/trajectory_layout.h"

namespace espalier::python {
namespace {

/// A plan with its forest, which outlives it, and what its micro-batches read of each other.
struct ForestPlan {
  const Forest& forest;
  Plan plan;
  Csr<ContextBlock> context{};  // row m: of micro-batch m
};

/// One of a plan's micro-batches. The plan outlives it.
struct PlannedBatch {
  const ForestPlan& of;
  int64_t index;

  const MicroBatch& batch() const { return of.plan.micro_batches[index]; }
  std::span<const ContextBlock> context() const { return of.context.row(index); }
};

ForestPlan plan(const Forest& forest, const PlanOptions& options) {
  ForestPlan result{forest, make_plan(forest, options)};
  const ContextIndex index(result.plan.micro_batches);
  for (int64_t m = 0; m < static_cast<int64_t>(result.plan.micro_batches.size()); ++m) {
    result.context.push_row(context_blocks(index, m));
  }
  return result;
}

int64_t num_batches(const ForestPlan& plan) {
  return static_cast<int64_t>(plan.plan.micro_batches.size());
}

PlannedBatch batch_at(const ForestPlan& plan, int64_t index) {
  if (index < 0 || index >= num_batches(plan)) throw nb::index_error("micro-batch out of range");
  return {plan, index};
}

TrajectoryLayout layout(const PlannedBatch& planned) {
  std::vector<int64_t> trajectories, end_run;
  for (const Placement& placement : planned.batch().trajectories) {
    trajectories.push_back(placement.trajectory);
    end_run.push_back(placement.run);
  }
  return {make_micro_batch_layout(planned.of.forest, planned.batch()), std::move(trajectories),
          std::move(end_run)};
}

nb::object context(const PlannedBatch& planned) {
  std::vector<int64_t> values;
  for (const ContextBlock& block : planned.context()) {
    values.insert(values.end(), {block.ancestor, block.column_begin, block.column_end, block.row_begin,
                                 block.row_end, block.position});
  }
  return nb::cast(take(std::move(values))).attr("reshape")(-1, 6);
}

nb::list runs(const MicroBatch& batch) {
  nb::list list;
  for (const Run& run : batch.runs)
    list.append(nb::cast(std::vector<int64_t>{run.begin, run.end, run.parent}));
  return list;
}

nb::dict batch_dict(const PlannedBatch& planned) {
  const MicroBatch& batch = planned.batch();
  nb::list trajectories;
  for (const Placement& placement : batch.trajectories) {
    nb::dict place;
    place["trajectory"] = placement.trajectory;
    place["run"] = placement.run;
    trajectories.append(place);
  }
  nb::dict dict;
  dict["tokens"] = batch.num_tokens;
  dict["visible_pairs"] = batch.num_pairs;
  dict["context_tokens"] = context_tokens(planned.context());
  dict["parent"] = batch.parent;
  dict["context_runs"] = nb::cast(batch.context_runs);
  dict["trajectories"] = trajectories;
  dict["runs"] = runs(batch);
  return dict;
}

nb::dict plan_dict(const ForestPlan& planned) {
  const Plan& plan = planned.plan;
  nb::list batches;
  for (int64_t m = 0; m < num_batches(planned); ++m) batches.append(batch_dict({planned, m}));
  nb::dict dict;
  dict["strategy"] = to_string(plan.options.strategy);
  dict["token_budget"] = plan.options.token_budget;
  dict["flat_tokens"] = planned.forest.flat_tokens();
  dict["tree_tokens"] = planned.forest.tree_tokens();
  dict["encoded_tokens"] = plan.num_tokens();
  dict["visible_pairs"] = plan.num_pairs();
  dict["effective_reuse_ratio"] = effective_reuse_ratio(planned.forest, plan);
  dict["micro_batches"] = batches;
  return dict;
}

std::string plan_text(const ForestPlan& planned) {
  return fmt::format("<espalier.Plan: {}, {}, {} encoded of {} flat tokens>",
                     to_string(planned.plan.options.strategy),
                     count_of(num_batches(planned), "micro-batch", "micro-batches"),
                     with_commas(planned.plan.num_tokens()), with_commas(planned.forest.flat_tokens()));
}

std::string batch_text(const PlannedBatch& planned) {
  const MicroBatch& batch = planned.batch();
  return fmt::format("<espalier.MicroBatch {}: {}, {}, {} of context>", planned.index,
                     count_of(batch.num_tokens, "token", "tokens"),
                     count_of(static_cast<int64_t>(batch.trajectories.size()), "trajectory", "trajectories"),
                     count_of(context_tokens(planned.context()), "token", "tokens"));
}

void bind_batch_class(nb::module_& module) {
  nb::class_<PlannedBatch>(
      module, "MicroBatch",
      "What runs in one forward and backward pass. Under partition it reads context: tokens of its\n"
      "ancestors, which are micro-batches that run before it.")
      .def_ro("index", &PlannedBatch::index, "Its place in the plan, which is the order of forward passes.")
      .def_prop_ro(
          "parent", [](const PlannedBatch& self) { return self.batch().parent; },
          "The micro-batch whose context it inherits, -1: none. Its backward pass comes before the parent's.")
      .def_prop_ro(
          "num_tokens", [](const PlannedBatch& self) { return self.batch().num_tokens; },
          "Tokens it encodes.")
      .def_prop_ro(
          "num_pairs", [](const PlannedBatch& self) { return self.batch().num_pairs; },
          "Visible (query, key) pairs of these tokens, keys in context included.")
      .def_prop_ro(
          "context_tokens", [](const PlannedBatch& self) { return context_tokens(self.context()); },
          "Tokens of other micro-batches that it reads, each counted once.")
      .def_prop_ro(
          "context", &context,
          "int64 [blocks, 6]: dense parts of the mask between this micro-batch and its ancestors. Each row "
          "is\n"
          "(ancestor, column_begin, column_end, row_begin, row_end, position): these columns of the "
          "ancestor's\n"
          "layout are visible to these rows of this one's; the first column has this position on its path.")
      .def_prop_ro(
          "context_runs",
          [](const PlannedBatch& self) { return take(std::vector(self.batch().context_runs)); },
          nb::rv_policy::automatic,
          "int64: for each root run of the layout, the run of the parent that it continues.")
      .def("layout", &layout, nb::call_guard<nb::gil_scoped_release>(),
           "The tokens that it encodes as a Layout, without its context. A path of it is the part of a "
           "trajectory\n"
           "that lies in this micro-batch.")
      .def("to_dict", &batch_dict,
           "Its counts, trajectories and runs [begin, end, parent run] of forest tokens.")
      .def("__repr__", &batch_text);
}

void bind_plan_class(nb::module_& module) {
  nb::class_<ForestPlan>(
      module, "Plan",
      "What runs together: micro-batches in the order of their forward passes. It has a length, and\n"
      "index m gives a MicroBatch.")
      .def_prop_ro(
          "strategy", [](const ForestPlan& self) { return to_string(self.plan.options.strategy); },
          "The strategy that was taken: partition, tree-packing or sequence-packing.")
      .def_prop_ro(
          "token_budget", [](const ForestPlan& self) { return self.plan.options.token_budget; },
          "Most tokens of a micro-batch; 0: no limit.")
      .def_prop_ro(
          "num_tokens", [](const ForestPlan& self) { return self.plan.num_tokens(); },
          "Tokens that are encoded: the tree's, and the prefixes that packing repeats.")
      .def_prop_ro(
          "num_pairs", [](const ForestPlan& self) { return self.plan.num_pairs(); },
          "Visible (query, key) pairs.")
      .def_prop_ro(
          "effective_reuse_ratio",
          [](const ForestPlan& self) { return effective_reuse_ratio(self.forest, self.plan); },
          "ERR: the part of the flat tokens that is not computed again.")
      .def("to_dict", &plan_dict,
           "The plan as numbers, lists and dicts, as `espalier plan --json` prints it.")
      .def("__len__", &num_batches)
      .def("__getitem__", &batch_at, nb::arg("index"), nb::keep_alive<0, 1>())
      .def("__repr__", &plan_text);
}

}  // namespace

void bind_plan(nb::module_& module) {
  bind_batch_class(module);
  bind_plan_class(module);
  module.def(
      "plan",
      [](const Forest& forest, const std::string& strategy, int64_t token_budget) {
        return plan(forest, {.strategy = parse_strategy(strategy), .token_budget = token_budget});
      },
      nb::arg("forest"), nb::arg("strategy"), nb::arg("token_budget"), nb::keep_alive<0, 1>(),
      nb::call_guard<Interruptible>(), "What espalier.plan does.");
}

}  // namespace espalier::python
