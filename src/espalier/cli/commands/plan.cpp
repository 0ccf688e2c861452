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
#include "espalier/base/output.h"
#include "espalier/base/units.h"
#include "espalier/cli/commands/commands.h"
#include "espalier/cli/commands/plan_of_model.h"
#include "espalier/cli/flags/model_flags.h"
#include "espalier/cli/print/plan_summary.h"
#include "espalier/cli/print/plan_table.h"
#include "espalier/plan/planner.h"
#include "espalier/plan/ranks.h"
#include "espalier/runtime/progress.h"

namespace espalier::cli {
namespace {

constexpr size_t kMostRows = 16;

std::string percent(double part) {
  return fmt::format("{:.1f}%", 100 * part);
}

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
  int64_t forest_tokens = 0;
  bool has_model = false;            // seconds are predicted for a given model
  double seconds_alone = 0;          // of one process for all trees
  double reduced_bytes = 0;          // of gradients in float32
  double link_bandwidth = 0;         // bytes per second into a process, and as many out of it; 0: not given
  std::vector<double> peak_bytes{};  // by rank; empty without a model

  double num_ranks() const { return static_cast<double>(plan.ranks.size()); }
  /// Each process sends and receives (N - 1) / N of the gradients, and then of the weights.
  double communication_seconds() const {
    return 2 * (num_ranks() - 1) / num_ranks() * reduced_bytes / link_bandwidth;
  }
  double efficiency() const {
    return seconds_alone / (num_ranks() * (plan.seconds() + communication_seconds()));
  }

  /// A few lines of figures, and a row per rank if there are few.
  std::string text() const {
    std::string text;
    const auto row = [&](const char* name, const std::string& value) {
      text += fmt::format("{:<20}{}\n", name, value);
    };
    const auto slowest = [&](const RankPlan& ranks) {
      const std::string seconds = has_model ? seconds_text(ranks.seconds()) + ", " : "";
      return fmt::format("{}{} over the mean", seconds, percent(ranks.imbalance()));
    };
    const auto idle =
        std::ranges::count_if(plan.ranks, [](const RankShare& r) { return r.trajectories.empty(); });
    row("ranks", with_commas(static_cast<int64_t>(plan.ranks.size())) +
                     (idle > 0 ? fmt::format(", {} of them idle", with_commas(idle)) : ""));
    row("slowest rank", slowest(plan));
    row("  over the bound",
        fmt::format("{} above the lower bound of any distribution",
                    percent(plan.least_seconds > 0 ? plan.seconds() / plan.least_seconds - 1 : 0)));
    if (!peak_bytes.empty()) {
      row("memory", fmt::format("{} at most, with the optimiser state divided",
                                human_bytes(*std::ranges::max_element(peak_bytes))));
    }
    if (link_bandwidth > 0) {
      row("communication", fmt::format("{} for {:.3g} GB of gradients and as many of weights, at most",
                                       seconds_text(communication_seconds()), reduced_bytes / 1e9));
      row("efficiency",
          fmt::format("{} of {} times one process, which takes {}", percent(efficiency()),
                      with_commas(static_cast<int64_t>(plan.ranks.size())), seconds_text(seconds_alone)));
    }
    row("split trees", fmt::format("{}, which repeat {} tokens ({})", with_commas(plan.split_trees),
                                   with_commas(plan.repeated_tokens),
                                   percent(static_cast<double>(plan.repeated_tokens) /
                                           std::max(1.0, static_cast<double>(forest_tokens)))));
    row("without trees",
        fmt::format("{}, {:.2f} times the seconds (whole trajectories, by Karmarkar-Karp)",
                    slowest(trajectories), plan.seconds() > 0 ? trajectories.seconds() / plan.seconds() : 1));
    if (plan.ranks.size() > kMostRows) return text;
    text += fmt::format("\n  {:>4}  {:>12}  {:>11}  {:>10}{}\n", "rank", "trajectories", "tree tokens",
                        has_model ? "time" : "of slowest", has_model ? "      memory" : "");
    for (size_t r = 0; r < plan.ranks.size(); ++r) {
      const RankShare& share = plan.ranks[r];
      text += fmt::format(
          "  {:>4}  {:>12}  {:>11}  {:>10}{}\n", r,
          with_commas(static_cast<int64_t>(share.trajectories.size())), with_commas(share.tree_tokens),
          has_model ? seconds_text(share.seconds) : percent(share.seconds / std::max(plan.seconds(), 1e-300)),
          has_model ? fmt::format("  {:>10}", human_bytes(peak_bytes[r])) : "");
    }
    return text;
  }

  /// Everything, with the trajectories of each rank.
  nlohmann::ordered_json json() const {
    nlohmann::ordered_json json = json_of(plan);
    json["without_trees"] = json_of(trajectories);
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

void run_plan(const PlanArguments& flags) {
  ESPALIER_CHECK(!flags.model.empty() || (!flags.lora.options() && flags.lora.adapter.empty()),
                 "--lora-rank, --adapter: require --model");
  ESPALIER_CHECK(!flags.model.empty() || flags.save_cost_model.empty(),
                 "--save-cost-model: requires --model, because rates are measured for a model");
  ESPALIER_CHECK(flags.link_bandwidth == 0 || (flags.ranks > 0 && !flags.model.empty()),
                 "--link-bandwidth: requires --ranks and --model, whose gradients are reduced");
  const ModelPlanner planner = flags.model.empty() ? ModelPlanner() : planner_of_model(flags);
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
    ranks = RankTable{.plan = distribute(forest, flags.ranks, rates),
                      .trajectories = distribute_trajectories(forest, flags.ranks, rates),
                      .forest_tokens = forest.tree_tokens(),
                      .has_model = !flags.model.empty(),
                      .seconds_alone = distribute(forest, 1, rates).seconds(),
                      .reduced_bytes = plan.reduced_bytes,
                      .link_bandwidth = flags.link_bandwidth * 1e9};
    for (const RankShare& share : ranks->plan.ranks) {
      if (plan.rank_bytes) ranks->peak_bytes.push_back(plan.rank_bytes(share.trajectories));
    }
  }
  if (flags.json) {
    nlohmann::ordered_json json = summary.json();
    if (ranks) json["distribution"] = ranks->json();
    print_output("{}\n", json.dump(1));
    return;
  }
  print_output("{}", summary.text());
  if (ranks) print_output("\n{}", ranks->text());
  if (flags.micro_batches) {
    const PlanTable table{.forest = &compared.step.forest,
                          .plan = &compared.step.plan,
                          .prediction = summary.chosen_prediction()};
    print_output("\n{}", table.rows());
  }
}

}  // namespace

Command plan_command() {
  const auto flags = std::make_shared<PlanArguments>();
  Command command{
      .name = "plan",
      .summary = "Print the plan of a step, its predicted time and memory, and those of other strategies",
      .closing =
          "With --model, time and memory are predicted from rates that are measured once per machine and "
          "model, and --memory-budget can replace --token-budget. Plans are compared by built-in rates, or "
          "by --cost-model FILE. `train` with the same flags uses the same plan.\n\n"
          "Example:\n"
          "  espalier plan --model DIR --data rows.jsonl --memory-budget 16GiB",
      .run = [flags](const OptionList&) {
        run_plan(*flags);
        return 0;
      }};
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
  list.add("link-bandwidth", &flags->link_bandwidth,
           "With --ranks, also predict the time in which gradients are reduced between processes, and the "
           "efficiency: the gigabytes per second that the slowest link of a process carries each way",
           {.above = 0, .shows_default = false});
  add_threads(&list, set_threads);
  list.group(kOutputGroup);
  list.add("micro-batches", &flags->micro_batches, "Print a table of the micro-batches as well");
  list.add("json", &flags->json,
           "Print JSON: the plan, every strategy (under `comparison`), and per micro-batch its "
           "trajectories and runs [begin, end, parent run] of forest tokens");
  return command;
}

}  // namespace espalier::cli
