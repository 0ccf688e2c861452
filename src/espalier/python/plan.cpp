// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <filesystem>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/option_names.h"
#include "espalier/base/units.h"
#include "espalier/config/config.h"
#include "espalier/inspect/report.h"
#include "espalier/plan/context.h"
#include "espalier/plan/division.h"
#include "espalier/plan/key_reads.h"
#include "espalier/plan/loss_work.h"
#include "espalier/plan/plan.h"
#include "espalier/plan/planner.h"
#include "espalier/plan/time_model.h"
#include "espalier/python/arrays.h"
#include "espalier/python/bindings.h"
#include "espalier/python/model_costs.h"
#include "espalier/python/trajectory_layout.h"
#include "espalier/tree/forest.h"

namespace espalier::python {

namespace {

Processor processor_of(const std::string& device) {
  ESPALIER_CHECK(device == "cpu" || device == "cuda", "{}: expected cpu or cuda, received `{}`",
                 named("device"), device);
  return device == "cpu" ? Processor::kCpu : Processor::kGpu;
}

ModelCosts costs(const std::filesystem::path& model, const std::string& device,
                 const std::optional<std::filesystem::path>& cost_model) {
  const Processor processor = processor_of(device);
  const DecoderConfig config =
      std::filesystem::is_regular_file(model) ? read_config_file(model) : read_config(model);
  const ModelCost cost = model_cost(config);
  return {config.model_type,
          cost_model ? read_cost_model(*cost_model, cost) : assumed_time_model(cost, processor)};
}

std::string costs_text(const ModelCosts& self) {
  return fmt::format("<espalier.Costs: {}, {} layers, {} rates>", self.model_type,
                     self.time.cost.layers.size(), self.time.calibrated ? "measured" : "built-in");
}

/// The predicted forward and backward cost of a plan with a model.
struct Prediction {
  LossFlops flops;
  std::vector<double> seconds;  // by micro-batch; 0 for those that do not run

  double total_seconds() const { return std::accumulate(seconds.begin(), seconds.end(), 0.0); }
};

/// A plan with its forest, which outlives it, and the context of its micro-batches.
struct ForestPlan {
  const Forest& forest;
  Plan plan;
  std::optional<Prediction> prediction;
  Gains gains{};
  Csr<ContextBlock> context{};  // row m: of micro-batch m
};

/// One of a plan's micro-batches. The plan outlives it.
struct PlannedBatch {
  const ForestPlan& forest_plan;
  int64_t index;

  const MicroBatch& batch() const { return forest_plan.plan.micro_batches[index]; }
  std::span<const ContextBlock> context() const { return forest_plan.context.row(index); }
  std::optional<double> seconds() const {
    return forest_plan.prediction ? std::optional(forest_plan.prediction->seconds[index]) : std::nullopt;
  }
};

/// `mask` [flat tokens]: nonzero where a token carries loss; nullopt: all do.
LossPositions loss_positions(const Forest& forest, const std::optional<Given<uint8_t>>& mask) {
  if (!mask) return all_loss_positions(forest);
  ESPALIER_CHECK(static_cast<int64_t>(mask->size()) == forest.flat_tokens(),
                 "loss_mask: expected {} entries (one for each token), received {}", forest.flat_tokens(),
                 mask->size());
  LossPositions loss;
  const uint8_t* row = mask->data();
  for (int64_t k = 0; k < forest.num_trajectories(); row += forest.trajectory_size(k++)) {
    for (int64_t position = 1; position < forest.trajectory_size(k); ++position) {
      if (row[position] != 0) loss.values.push_back(position);
    }
    loss.end_row();
  }
  return loss;
}

Prediction predict(const TimeModel& model, const Forest& forest, const Plan& plan,
                   const LossPositions& loss) {
  Prediction prediction{.flops = loss_flops(model.cost, forest, plan, loss), .seconds = {}};
  for (const Load& load : loads_with_loss(forest, plan, loss, model.cost.sliding_windows())) {
    prediction.seconds.push_back(
        load.tokens > 0 ? predicted_seconds(model, load, plan.options.checkpoint_activations) : 0);
  }
  return prediction;
}

/// Fills the context of a plan from its micro-batches.
ForestPlan with_context(ForestPlan plan) {
  const ContextIndex index(plan.plan.micro_batches);
  for (int64_t m = 0; m < static_cast<int64_t>(plan.plan.micro_batches.size()); ++m) {
    plan.context.push_row(context_blocks(index, m));
  }
  return plan;
}

ForestPlan plan(const Forest& forest, const PlanOptions& options, const ModelCosts* costs,
                const std::optional<Given<uint8_t>>& loss_mask) {
  ForestPlan result{
      forest, costs == nullptr ? make_plan(forest, options) : make_plan(forest, options, costs->plan_costs()),
      std::nullopt};
  if (costs == nullptr) {
    result.gains = Gains::in_tokens(forest_statistics(forest), result.plan.num_tokens());
  } else {
    result.prediction = predict(costs->time, forest, result.plan, loss_positions(forest, loss_mask));
    const LossFlops& flops = result.prediction->flops;
    result.gains = Gains::of(flops.sequence_packing, flops.append_only, flops.plan, /*in_flops=*/true);
  }
  return with_context(std::move(result));
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
  return {make_micro_batch_layout(planned.forest_plan.forest, planned.batch()), std::move(trajectories),
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
  if (const auto seconds = planned.seconds()) dict["predicted_seconds"] = *seconds;
  dict["trajectories"] = trajectories;
  dict["runs"] = runs(batch);
  return dict;
}

nb::dict flops_dict(const LossFlops& flops) {
  nb::dict dict;
  dict["plan"] = flops.plan;
  dict["sequence_packing"] = flops.sequence_packing;
  dict["append_only"] = flops.append_only;
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
  dict["predicted_speedup_over_sequence_packing"] = planned.gains.over_packing;
  dict["predicted_speedup_over_append_only"] = planned.gains.over_append_only;
  dict["prediction_counts"] = planned.gains.in_flops ? "FLOPs" : "tokens";
  if (const auto& prediction = planned.prediction) {
    dict["flops"] = flops_dict(prediction->flops);
    dict["predicted_seconds"] = prediction->total_seconds();
  }
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

// The state of pickles and copies: the forest as a Python object, so that several plans of one forest share
// it, and the rest as numbers.

nb::tuple batch_state(const MicroBatch& batch) {
  std::vector<int64_t> runs, placements;
  for (const Run& run : batch.runs) runs.insert(runs.end(), {run.begin, run.end, run.parent});
  for (const Placement& each : batch.trajectories) {
    placements.insert(placements.end(), {each.trajectory, each.run});
  }
  return nb::make_tuple(take(std::move(runs)), take(std::move(placements)), batch.num_tokens, batch.num_pairs,
                        batch.parent, take(std::vector(batch.context_runs)));
}

MicroBatch restored_batch(nb::handle state) {
  MicroBatch batch;
  batch.num_tokens = nb::cast<int64_t>(state[2]);
  batch.num_pairs = nb::cast<int64_t>(state[3]);
  batch.parent = nb::cast<int64_t>(state[4]);
  batch.context_runs = vector_of<int64_t>(state[5]);
  const auto runs = vector_of<int64_t>(state[0]), placements = vector_of<int64_t>(state[1]);
  for (size_t k = 0; k < runs.size(); k += 3) batch.runs.push_back({runs[k], runs[k + 1], runs[k + 2]});
  for (size_t k = 0; k < placements.size(); k += 2) {
    batch.trajectories.push_back({placements[k], placements[k + 1]});
  }
  return batch;
}

nb::dict plan_state(const ForestPlan& planned) {
  nb::list batches;
  for (const MicroBatch& batch : planned.plan.micro_batches) batches.append(batch_state(batch));
  nb::dict state;
  state["strategy"] = to_string(planned.plan.options.strategy);
  state["token_budget"] = planned.plan.options.token_budget;
  state["micro_batches"] = batches;
  const Gains& gains = planned.gains;
  state["gains"] = nb::make_tuple(gains.over_packing, gains.over_append_only, gains.in_flops);
  if (const auto& prediction = planned.prediction) {
    const LossFlops& flops = prediction->flops;
    state["flops"] = nb::make_tuple(flops.plan, flops.sequence_packing, flops.append_only);
    state["seconds"] = nb::cast(prediction->seconds);
  }
  return state;
}

ForestPlan restored_plan(const Forest& forest, const nb::dict& state) {
  ForestPlan result{.forest = forest, .plan = {}, .prediction = std::nullopt};
  result.plan.options.strategy = parse_strategy(nb::cast<std::string>(state["strategy"]));
  result.plan.options.token_budget = nb::cast<int64_t>(state["token_budget"]);
  for (nb::handle batch : nb::cast<nb::list>(state["micro_batches"])) {
    result.plan.micro_batches.push_back(restored_batch(batch));
  }
  const nb::object gains = state["gains"];
  result.gains = {.over_packing = nb::cast<double>(gains[0]),
                  .over_append_only = nb::cast<double>(gains[1]),
                  .in_flops = nb::cast<bool>(gains[2])};
  if (state.contains("flops")) {
    const nb::object flops = state["flops"];
    result.prediction = Prediction{.flops = {.plan = nb::cast<double>(flops[0]),
                                             .sequence_packing = nb::cast<double>(flops[1]),
                                             .append_only = nb::cast<double>(flops[2])},
                                   .seconds = nb::cast<std::vector<double>>(state["seconds"])};
  }
  return with_context(std::move(result));
}

nb::tuple reduced_plan(const ForestPlan& planned) {
  const nb::object restore = nb::module_::import_("espalier._core").attr("restored_plan");
  return nb::make_tuple(restore, nb::make_tuple(nb::find(planned.forest), plan_state(planned)));
}

nb::tuple reduced_batch(const PlannedBatch& planned) {
  const nb::object get = nb::module_::import_("operator").attr("getitem");
  return nb::make_tuple(get, nb::make_tuple(nb::find(planned.forest_plan), planned.index));
}

/// A plan whose micro-batches are divided over ranks. The plan outlives it.
struct DividedPlan {
  const ForestPlan& forest_plan;
  int64_t ranks;
  std::vector<TokenDivision> divisions;  // by micro-batch
};

DividedPlan divide(const ForestPlan& planned, int64_t ranks, double pair_cost, bool is_contiguous) {
  const Sharding sharding = is_contiguous ? Sharding::kContiguous : Sharding::kBalanced;
  return {planned, ranks,
          token_divisions(planned.forest, planned.plan.micro_batches, ranks, pair_cost, sharding)};
}

nb::object ranges(const DividedPlan& divided, int64_t index) {
  std::vector<int64_t> values;
  for (const TokenRange& range : divided.divisions.at(index).ranges()) {
    values.insert(values.end(), {range.begin, range.end, range.rank});
  }
  return nb::cast(take(std::move(values))).attr("reshape")(-1, 3);
}

KeyReads keys_of_rank(const DividedPlan& divided, int64_t index, const TrajectoryLayout& layout, int64_t rank,
                      int64_t window, int64_t chunk) {
  const DividedMicroBatch batch{.layout = layout,
                                .context = divided.forest_plan.context.row(index),
                                .divisions = divided.divisions,
                                .own = divided.divisions.at(index),
                                .ranks = divided.ranks};
  return key_reads(batch, rank, window, chunk);
}

/// The getter of a property that copies a member of KeyReads.
auto array_of(std::vector<int64_t> KeyReads::* member) {
  return [member](const KeyReads& self) { return take(std::vector(self.*member)); };
}

void bind_division_classes(nb::module_& module) {
  nb::class_<KeyReads>(
      module, "KeyReads",
      "The keys that one rank sends, receives and sees in the attention of a divided micro-batch.")
      .def_prop_ro(
          "picks",
          [](const KeyReads& self) {
            std::vector<Array<int64_t>> picks;
            for (const std::vector<int64_t>& of_source : self.picks)
              picks.push_back(take(std::vector(of_source)));
            return picks;
          },
          nb::rv_policy::automatic,
          "By source int64: its rows that are sent, each once for every reader. Sources are the ancestors "
          "whose context\nthe micro-batch reads, root first, and then the micro-batch itself.")
      .def_prop_ro("order", array_of(&KeyReads::order), nb::rv_policy::automatic,
                   "int64: all picks, one source after another, in the order of sending; empty: as they are.")
      .def_prop_ro("send", array_of(&KeyReads::send), nb::rv_policy::automatic,
                   "int64 [ranks]: keys for each.")
      .def_prop_ro("receive", array_of(&KeyReads::receive), nb::rv_policy::automatic,
                   "int64 [ranks]: keys from each.")
      .def_ro("most_received", &KeyReads::most_received, "Keys of the rank that receives most.")
      .def_prop_ro(
          "blocks",
          [](const KeyReads& self) {
            return nb::cast(take(std::vector(self.blocks))).attr("reshape")(-1, 5);
          },
          nb::for_getter(nb::sig("def blocks(self) -> numpy.typing.NDArray[numpy.int64]")),
          "int64 [P, 5], as ops.tree_attention takes them. Segments are this rank's rows of the ancestors, "
          "and then what\nit receives, by rank.")
      .def_prop_ro("positions", array_of(&KeyReads::positions), nb::rv_policy::automatic,
                   "int64 [P]: of each block's first key.");
  nb::class_<DividedPlan>(module, "DividedPlan", "A Plan whose micro-batches are divided over ranks.")
      .def("ranges", &ranges, nb::arg("micro_batch"),
           nb::sig("def ranges(self, micro_batch: int) -> numpy.typing.NDArray[numpy.int64]"),
           "int64 [N, 3]: each range as (begin, end, rank), in the order of the tokens, which they cover.")
      .def(
          "costs",
          [](const DividedPlan& self, int64_t index) {
            return take(std::vector(self.divisions.at(index).costs()));
          },
          nb::arg("micro_batch"), nb::rv_policy::automatic,
          "float64 [ranks]: of each, where a token costs 1.")
      .def(
          "tokens",
          [](const DividedPlan& self, int64_t index, int64_t rank) {
            return take(self.divisions.at(index).tokens(rank));
          },
          nb::arg("micro_batch"), nb::arg("rank"), nb::rv_policy::automatic,
          "int64: the tokens of a rank in the layout, ascending.")
      .def("key_reads", &keys_of_rank, nb::arg("micro_batch"), nb::arg("layout"), nb::arg("rank"),
           nb::arg("window"), nb::arg("chunk"), nb::call_guard<nb::gil_scoped_release>(),
           "What attention reads on a rank with a sliding window or in chunks, 0: none. layout: of the "
           "micro-batch.");
}

void bind_batch_class(nb::module_& module) {
  nb::class_<PlannedBatch>(
      module, "MicroBatch",
      "The unit of one forward and backward pass. Under partition it reads context: "
      "tokens of its ancestors,\n"
      "micro-batches that run before it.\n\n"
      "Examples:\n"
      "    >>> import espalier\n"
      "    >>> root, rest = espalier.plan(espalier.build([[1, 2, 3, 4], [1, 2, 5]]), token_budget=4)\n"
      "    >>> rest.parent, rest.num_tokens, rest.context_tokens\n"
      "    (0, 4, 1)")
      .def_ro("index", &PlannedBatch::index, "Its index in the plan, the order of forward passes.")
      .def_prop_ro(
          "parent", [](const PlannedBatch& self) { return self.batch().parent; },
          "The micro-batch whose context it inherits, -1: none. Its backward pass precedes the parent's.")
      .def_prop_ro(
          "num_tokens", [](const PlannedBatch& self) { return self.batch().num_tokens; },
          "Tokens it encodes.")
      .def_prop_ro(
          "num_pairs", [](const PlannedBatch& self) { return self.batch().num_pairs; },
          "Visible (query, key) pairs of these tokens, keys in context included.")
      .def_prop_ro(
          "context_tokens", [](const PlannedBatch& self) { return context_tokens(self.context()); },
          "Tokens of other micro-batches that it reads, each counted once.")
      .def_prop_ro("seconds", &PlannedBatch::seconds,
                   "Predicted for forward and backward, 0 if no token carries loss. None without a model.")
      .def_prop_ro(
          "context", &context,
          "int64 [blocks, 6]: dense blocks of the mask between this micro-batch and its ancestors. Each row "
          "is\n"
          "(ancestor, column_begin, column_end, row_begin, row_end, position): these columns of the "
          "ancestor's\n"
          "layout are visible to these rows of this layout; the first column has this position on its path.",
          nb::for_getter(nb::sig("def context(self) -> numpy.typing.NDArray[numpy.int64]")))
      .def_prop_ro(
          "context_runs",
          [](const PlannedBatch& self) { return take(std::vector(self.batch().context_runs)); },
          nb::rv_policy::automatic,
          "int64: for each root run of the layout, the run of the parent that it continues.")
      .def("layout", &layout, nb::call_guard<nb::gil_scoped_release>(),
           "The tokens that it encodes as a Layout, without its context. A path in it is the part of a "
           "trajectory\n"
           "in this micro-batch.")
      .def("to_dict", &batch_dict, nb::sig("def to_dict(self) -> dict[str, typing.Any]"),
           "Its counts, trajectories and runs [begin, end, parent run] of forest tokens.")
      .def("__reduce__", &reduced_batch)
      .def("__repr__", &batch_text);
}

void bind_plan_class(nb::module_& module) {
  nb::class_<ForestPlan>(
      module, "Plan",
      "Micro-batches in the order of their forward passes. It has a length, and index m gives a "
      "MicroBatch.\n\n"
      "Examples:\n"
      "    >>> import espalier\n"
      "    >>> plan = espalier.plan(espalier.build([[1, 2, 3, 4], [1, 2, 5]]), token_budget=4)\n"
      "    >>> plan.strategy, len(plan), plan[0].num_tokens\n"
      "    ('partition', 2, 1)")
      .def_prop_ro(
          "strategy", [](const ForestPlan& self) { return to_string(self.plan.options.strategy); },
          "The strategy that was chosen: partition, tree-packing, append-only or sequence-packing.")
      .def_prop_ro(
          "token_budget", [](const ForestPlan& self) { return self.plan.options.token_budget; },
          "Maximum tokens per micro-batch; 0: no limit.")
      .def_prop_ro(
          "num_tokens", [](const ForestPlan& self) { return self.plan.num_tokens(); },
          "Encoded tokens: those of the tree, and prefixes that packing repeats.")
      .def_prop_ro(
          "num_pairs", [](const ForestPlan& self) { return self.plan.num_pairs(); },
          "Visible (query, key) pairs.")
      .def_prop_ro(
          "effective_reuse_ratio",
          [](const ForestPlan& self) { return effective_reuse_ratio(self.forest, self.plan); },
          "ERR: the fraction of the flat tokens that is not recomputed.")
      .def_prop_ro(
          "flops",
          [](const ForestPlan& self) {
            return self.prediction ? std::optional(self.prediction->flops.plan) : std::nullopt;
          },
          "FLOPs of forward and backward, a multiply-add counted as two. None without a model.")
      .def_prop_ro(
          "seconds",
          [](const ForestPlan& self) {
            return self.prediction ? std::optional(self.prediction->total_seconds()) : std::nullopt;
          },
          "Predicted for forward and backward of all micro-batches. None without a model.")
      .def_prop_ro(
          "speedup_over_sequence_packing", [](const ForestPlan& self) { return self.gains.over_packing; },
          "Upper bound of the speed-up over encoding every trajectory separately: in FLOPs, without a model "
          "in tokens.")
      .def_prop_ro(
          "speedup_over_append_only", [](const ForestPlan& self) { return self.gains.over_append_only; },
          "Likewise over append-only merging, which drops trajectories that others extend.")
      .def("to_dict", &plan_dict,
           "The plan as numbers, lists and dicts, as `espalier plan --json` prints it.",
           nb::sig("def to_dict(self) -> dict[str, typing.Any]"))
      .def("__len__", &num_batches)
      .def("__iter__", &iterator_of, nb::sig("def __iter__(self) -> collections.abc.Iterator[MicroBatch]"))
      .def("__getitem__", &batch_at, nb::arg("index"), nb::keep_alive<0, 1>())
      .def("__reduce__", &reduced_plan)
      .def("__repr__", &plan_text);
}

}  // namespace

void bind_costs(nb::module_& module) {
  nb::class_<ModelCosts>(
      module, "Costs",
      "The cost of a model's forward and backward passes: FLOPs by its config.json, and "
      "seconds by\nbuilt-in or measured rates.\n\n"
      "Examples:\n"
      "    >>> import espalier, transformers\n"
      "    >>> config = transformers.LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=48,\n"
      "    ...                                   num_attention_heads=4, num_key_value_heads=2)\n"
      "    >>> espalier.costs(config).model_type\n"
      "    'llama'")
      .def_ro("model_type", &ModelCosts::model_type, "The family, as in config.json.")
      .def_prop_ro(
          "calibrated", [](const ModelCosts& self) { return self.time.calibrated; },
          "Whether the rates were measured. Built-in rates suffice to compare plans, but do not predict "
          "times.")
      .def("__repr__", &costs_text);
  module.def("costs", &costs, nb::arg("model"), nb::arg("device"), nb::arg("cost_model").none(),
             "Implements espalier.costs.");
  module.def(
      "pair_cost",
      [](const ModelCosts* costs) { return pair_cost(costs == nullptr ? common_costs().time : costs->time); },
      nb::arg("costs").none(),
      "What a visible pair of tokens costs, where a token costs 1; None: in a typical decoder.");
}

void bind_plan(nb::module_& module) {
  bind_batch_class(module);
  bind_plan_class(module);
  bind_division_classes(module);
  module.def(
      "plan",
      [](const Forest& forest, const std::string& strategy, int64_t token_budget, const ModelCosts* costs,
         const std::optional<Given<uint8_t>>& loss_mask) {
        return plan(forest, {.strategy = parse_strategy(strategy), .token_budget = token_budget}, costs,
                    loss_mask);
      },
      nb::arg("forest"), nb::arg("strategy"), nb::arg("token_budget"), nb::arg("costs").none(),
      nb::arg("loss_mask").none(), nb::keep_alive<0, 1>(), nb::call_guard<Interruptible>(),
      "Implements espalier.plan.");
  module.def("divide", &divide, nb::arg("plan"), nb::arg("ranks"), nb::arg("pair_cost"),
             nb::arg("is_contiguous"), nb::keep_alive<0, 1>(), nb::call_guard<Interruptible>(),
             "Divides the micro-batches of a plan over ranks. is_contiguous: each gets one range, as "
             "recurrences want it.");
  module.def("restored_plan", &restored_plan, nb::arg("forest"), nb::arg("state"), nb::keep_alive<0, 1>(),
             "Restores a pickled Plan.");
}

}  // namespace espalier::python
