// SPDX-License-Identifier: Apache-2.0
// espalier plan: the plan of a step, its predicted cost, and its distribution over ranks.
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/units.h"
#include "espalier/commands/command.h"
#include "espalier/commands/plan_of_model.h"
#include "espalier/commands/plan_summary.h"
#include "espalier/commands/plan_table.h"
#include "espalier/plan/planner.h"
#include "espalier/plan/ranks.h"
#include "espalier/runtime/progress.h"

namespace espalier::commands {
namespace {

nlohmann::ordered_json json_of(const RankPlan& plan) {
  return {{"seconds", plan.seconds()},
          {"imbalance", plan.imbalance()},
          {"least_seconds", plan.least_seconds},
          {"split_trees", plan.split_trees},
          {"repeated_tokens", plan.repeated_tokens}};
}

/// The output of --ranks: a distribution over ranks, and for comparison one of whole trajectories without
/// trees.
struct RankTable {
  RankPlan plan;
  RankPlan trajectories;
  double seconds_alone = 0;          // of one process for all trees
  double reduced_bytes = 0;          // of gradients in float32
  double link_bandwidth = 0;         // bytes per second into a process, and as many out of it; 0: not given
  std::vector<double> peak_bytes{};  // by rank; empty without a model

  double num_ranks() const {
    return static_cast<double>(static_cast<int64_t>(plan.ranks.size()) * plan.context_parallel);
  }
  /// Each process sends and receives (N - 1) / N of the gradients, and then of the weights.
  double communication_seconds() const {
    return 2 * (num_ranks() - 1) / num_ranks() * reduced_bytes / link_bandwidth;
  }
  double efficiency() const {
    return seconds_alone / (num_ranks() * (plan.seconds() + communication_seconds()));
  }

  /// Everything, with the trajectories of each rank.
  nlohmann::ordered_json json() const {
    nlohmann::ordered_json json = json_of(plan);
    json["without_trees"] = json_of(trajectories);
    json["context_parallel"] = plan.context_parallel;
    if (link_bandwidth > 0) {
      json["communication_seconds"] = communication_seconds();
      json["reduced_bytes"] = reduced_bytes;
      json["efficiency"] = efficiency();
    }
    json["ranks"] = nlohmann::ordered_json::array();
    for (const RankShare& share : plan.ranks) {
      json["ranks"].push_back({{"trajectories", share.trajectories},
                               {"tree_tokens", share.tree_tokens},
                               {"predicted_seconds", share.seconds}});
      const size_t r = json["ranks"].size() - 1;
      if (!peak_bytes.empty()) json["ranks"][r]["predicted_peak_bytes"] = std::llround(peak_bytes[r]);
    }
    return json;
  }
};

// The values of --dtype.
constexpr auto kDtypes = std::to_array<Word<std::string_view>>(
    {{"float64", "float64"}, {"float32", "float32"}, {"bfloat16", "bfloat16"}});

nlohmann::ordered_json run_plan(const PlanArguments& flags, const PlanTools& tools) {
  ESPALIER_CHECK(!flags.model.empty() || (!flags.lora.options() && flags.lora.adapter.empty()),
                 "--lora-rank, --adapter: require --model");
  ESPALIER_CHECK(!flags.model.empty() || flags.save_cost_model.empty(),
                 "--save-cost-model: requires --model, because rates are measured for a model");
  ESPALIER_CHECK(flags.link_bandwidth == 0 || (flags.ranks > 0 && !flags.model.empty()),
                 "--link-bandwidth: requires --ranks and --model, whose gradients are reduced");
  ESPALIER_CHECK(flags.context_parallel == 1 || flags.ranks > 0, "--context-parallel: requires --ranks");
  ESPALIER_CHECK(
      flags.context_parallel != 0 || flags.link_bandwidth > 0,
      "--context-parallel 0: requires --link-bandwidth, which limits how many ranks are the fastest");
  ESPALIER_CHECK(flags.model.empty() || tools.planner_of_model, "plan --model needs LibTorch");
  const ModelPlanner planner = flags.model.empty() ? ModelPlanner() : tools.planner_of_model(flags);
  const Trajectories trajectories = flags.data.read(data_use_of(flags.model));
  PlanSummary summary{.asked = flags.planning.options(trajectories)};
  std::optional<Progress> progress("plan");
  const PlanProgress comparing = [&](const PlanOptions& way, double fraction) {
    progress->update(fraction, way_text(way));
  };
  const StepOptions options{.plan = summary.asked, .terms = TermChoice::kWithLossOrAll};
  ComparedStep compared;
  TimeModel rates = common_costs().time;
  StepFlops flops;
  ModelPlan plan;
  if (!planner) {
    compared = compare_step_plans(trajectories, options, comparing);
  } else {
    plan = planner(trajectories, options, comparing, [&](const std::string& text) { progress->line(text); });
    compared = std::move(plan.compared);
    summary.predictions = std::move(plan.predictions);
    summary.calibrated = plan.rates.calibrated;
    rates = std::move(plan.rates);
    flops.add(plan.cost, compared.step);
    summary.flops = flops;
  }
  progress.reset();
  summary.step = &compared.step;
  summary.plans = &compared.plans;
  summary.gains = flops.plan > 0 ? flops.gains()
                                 : Gains::in_tokens(forest_statistics(compared.step.forest),
                                                    compared.step.plan.num_tokens());
  std::optional<RankTable> ranks;
  if (const Forest& forest = compared.step.forest; flags.ranks > 0) {
    const double bandwidth = flags.link_bandwidth * 1e9;
    const double seconds_per_token = bandwidth > 0 ? 2 * plan.context_bytes_per_token / bandwidth : 0;
    ranks =
        RankTable{.plan = distribute(forest, flags.ranks, rates, flags.context_parallel, seconds_per_token),
                  .trajectories = distribute_trajectories(forest, flags.ranks, rates),
                  .seconds_alone = distribute(forest, 1, rates).seconds(),
                  .reduced_bytes = plan.reduced_bytes,
                  .link_bandwidth = bandwidth};
    for (const RankShare& share : ranks->plan.ranks) {
      // `train` does not divide recurrent layers.
      if (plan.rank_bytes && (flags.context_parallel == 1 || plan.cost.recurrence() == 0))
        ranks->peak_bytes.push_back(plan.rank_bytes(share.trajectories, ranks->plan.context_parallel));
    }
  }
  nlohmann::ordered_json json = summary.json();
  if (flags.json) json["micro_batches"] = micro_batches_json(compared.step.plan, summary.chosen_prediction());
  if (ranks) json["distribution"] = ranks->json();
  if (flags.json) return json;
  nlohmann::ordered_json asked = summary.asked_json();
  if (ranks) asked["seconds_alone"] = ranks->seconds_alone;
  nlohmann::ordered_json result = {{"plan", std::move(json)}, {"asked", std::move(asked)}};
  if (flags.micro_batches) result["table"] = table_json(compared.step, summary.chosen_prediction());
  return result;
}

}  // namespace

Command plan_command(const Caller&, const PlanTools& tools) {
  const auto flags = std::make_shared<PlanArguments>();
  Command command{.run = [flags, tools](const OptionList&) { return Result{run_plan(*flags, tools)}; }};
  OptionList& list = command.options;
  flags->data.add(&list);
  add_model(&list, &flags->model, "Hugging Face model folder, to predict time and memory");
  list.add("dtype", &flags->dtype, kDtypes, "Precision to predict for", {.group = kMachineGroup});
  flags->device.add(&list, /*trains=*/false);
  flags->planning.add(&list);
  flags->lora.add(&list);
  list.group("Plan");
  add_optimizer(&flags->optimizer, &list, "Optimiser whose state is counted as memory: adamw or sgd");
  list.add("save-cost-model", &flags->save_cost_model,
           "Write the rates behind the predicted times to this file, so that --cost-model can compare "
           "plans by them",
           {.path = PathKind::kFile});
  list.add("ranks", &flags->ranks,
           "Also distribute the trajectories over this many processes by predicted time: whole trees, "
           "and branches of trees that are too large for one process",
           {.least = 1, .shows_default = false});
  list.add(
      "context-parallel", &flags->context_parallel,
      "With --ranks, how many of them compute each tree together, each a part of it: a divisor of --ranks, "
      "or 0 for the fastest one",
      {.least = 0});
  list.add("link-bandwidth", &flags->link_bandwidth,
           "With --ranks, also predict the time in which gradients are reduced and --context-parallel sends "
           "keys and values, and the efficiency: the gigabytes per second that the slowest link of a process "
           "carries each way",
           {.above = 0, .shows_default = false});
  add_threads(&list, tools.set_threads);
  list.group(kOutputGroup);
  list.add("micro-batches", &flags->micro_batches, "Print a table of the micro-batches as well");
  list.add("json", &flags->json,
           "Print JSON: the plan, every strategy (under `comparison`), and per micro-batch its "
           "trajectories and runs [begin, end, parent run] of forest tokens");
  return command;
}

}  // namespace espalier::commands
