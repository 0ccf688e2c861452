// SPDX-License-Identifier: Apache-2.0
// espalier plan: the plan of a step, its predicted cost, and its distribution over ranks.
#include <array>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/output.h"
#include "espalier/cli/commands/commands.h"
#include "espalier/cli/commands/plan_of_model.h"
#include "espalier/cli/flags/model_flags.h"
#include "espalier/cli/print/plan_summary.h"
#include "espalier/cli/print/plan_table.h"
#include "espalier/cli/print/rank_table.h"
#include "espalier/cli/print/step_gains.h"
#include "espalier/plan/common_costs.h"
#include "espalier/runtime/progress.h"

namespace espalier::cli {

namespace {

// The values of --dtype.
constexpr auto kDtypes = std::to_array<Word<std::string_view>>(
    {{"float64", "float64"}, {"float32", "float32"}, {"bfloat16", "bfloat16"}});

void run_plan(const PlanArguments& flags) {
  ESPALIER_CHECK(!flags.model.empty() || (!flags.lora.options() && flags.lora.adapter.empty()),
                 "--lora-rank, --adapter: require --model");
  ESPALIER_CHECK(!flags.model.empty() || flags.save_cost_model.empty(),
                 "--save-cost-model: requires --model, because rates are measured for a model");
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
  if (!planner) {
    compared = compare_step_plans(trajectories, options, comparing);
  } else {
    ModelPlan plan =
        planner(trajectories, options, comparing, [&](const std::string& text) { progress->line(text); });
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
  summary.gains = flops.plan > 0 ? flops.gains() : token_gains(compared.step.forest, compared.step.plan);
  std::optional<RankTable> ranks;
  if (flags.ranks > 0) ranks.emplace(compared.step.forest, flags.ranks, rates, !flags.model.empty());
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
  add_threads(&list, set_threads);
  list.group(kOutputGroup);
  list.add("micro-batches", &flags->micro_batches, "Print a table of the micro-batches as well");
  list.add("json", &flags->json,
           "Print JSON: the plan, every strategy (under `comparison`), and per micro-batch its "
           "trajectories and runs [begin, end, parent run] of forest tokens");
  return command;
}

}  // namespace espalier::cli
