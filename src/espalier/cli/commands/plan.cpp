// SPDX-License-Identifier: Apache-2.0
// espalier plan: what would run together.
#include <memory>
#include <optional>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/output.h"
#include "espalier/cli/commands/commands.h"
#include "espalier/cli/flags/data_flags.h"
#include "espalier/cli/flags/lora_flags.h"
#include "espalier/cli/flags/model_flags.h"
#include "espalier/cli/print/plan_summary.h"
#include "espalier/cli/print/plan_table.h"
#include "espalier/cli/print/rank_table.h"
#include "espalier/cli/print/step_gains.h"
#include "espalier/engine/batch.h"
#include "espalier/measure/device_options.h"
#include "espalier/measure/planning.h"
#include "espalier/model/weights/tensor_bytes.h"
#include "espalier/model/weights/weights.h"
#include "espalier/plan/common_costs.h"
#include "espalier/plan/cost_model_file.h"
#include "espalier/plan/planner.h"
#include "espalier/runtime/progress.h"
#include "espalier/train/train_options.h"

namespace espalier::cli {

namespace {

struct PlanArguments {
  DataFlags data;
  Planning planning;
  DeviceOptions device;
  LoraFlags lora;
  std::string model, save_cost_model;
  at::ScalarType dtype = at::kFloat;
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  int64_t ranks = 0;
  bool micro_batches = false, json = false;
};

void run_plan(const PlanArguments& flags) {
  ESPALIER_CHECK(!flags.model.empty() || (!flags.lora.options() && flags.lora.adapter.empty()),
                 "--lora-rank, --adapter: adapters are those of a model; give --model");
  ESPALIER_CHECK(!flags.model.empty() || flags.save_cost_model.empty(),
                 "--save-cost-model: rates are those of a model on this machine; give --model");
  const auto [device, kernels] = flags.model.empty() ? Machine() : flags.device.open();
  const KernelScope scope(kernels);
  const Trajectories trajectories = flags.data.read(data_use_of(flags.model));
  TimeModel rates = common_costs().time;
  PlanSummary summary{.asked = flags.planning.options(trajectories)};
  std::optional<Progress> progress("plan");
  const PlanProgress comparing = [&](const PlanOptions& way, double fraction) {
    progress->update(fraction, way_text(way));
  };
  StepOptions options{.plan = summary.asked, .terms = TermChoice::kWithLossOrAll};
  ComparedStep compared;
  StepFlops flops;
  if (flags.model.empty()) {
    compared = compare_step_plans(trajectories, options, comparing);
  } else {
    const ModelUse use{.config = read_config(flags.model),
                       .dtype = flags.dtype,
                       .device = device,
                       .optimizer_bytes = optimizer_bytes(flags.optimizer, flags.dtype),
                       .lora = flags.lora.trained(read_config(flags.model))};
    const PlanCosts costs =
        flags.planning.measured_costs(use, [&](const std::string& text) { progress->line(text); });
    const PlanCosts compared_by = flags.planning.costs(use);
    options.costs = &compared_by;
    compared = compare_step_plans(trajectories, options, comparing);
    if (!flags.save_cost_model.empty()) {
      write_text(flags.save_cost_model, cost_model_json(costs.time).dump(2) + "\n");
    }
    summary.predictions = predict_candidates(costs, &compared);
    summary.calibrated = costs.time.calibrated;
    rates = costs.time;
    flops.add(use.cost(), compared.step);
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
      .summary =
          "Print the plan of a step, the time and memory it takes, and what the other strategies "
          "would take",
      .closing =
          "With --model, time and memory are predicted from rates that are measured once per machine and "
          "model, "
          "and --memory-budget can replace --token-budget. Plans are compared by built-in rates, or by "
          "--cost-model FILE. `train` with equal flags takes the plan that is chosen here.\n\nExample:\n"
          "  espalier plan --model DIR --data rows.jsonl --memory-budget 16GiB",
      .run = [flags](const OptionList&) {
        run_plan(*flags);
        return 0;
      }};
  OptionList& list = command.options;
  flags->data.add(&list);
  add_model(&list, &flags->model, "Hugging Face model folder, to predict time and memory");
  add_dtype(&list, "dtype", &flags->dtype, "Precision to predict for");
  flags->device.add(&list, /*trains=*/false);
  flags->planning.add(&list);
  flags->lora.add(&list);
  list.group("Plan");
  add_optimizer(&flags->optimizer, &list, "Optimiser whose state is counted as memory: adamw or sgd");
  list.add("save-cost-model", &flags->save_cost_model,
           "Write the rates behind the predicted times to this file. With --cost-model, plans are "
           "then compared by these measured rates",
           {.path = PathKind::kFile});
  list.add("ranks", &flags->ranks,
           "Also distribute the trajectories over so many processes by predicted time: whole trees, "
           "and branches of those that are too heavy for one",
           {.least = 1, .shows_default = false});
  add_threads(&list);
  list.group(kOutputGroup);
  list.add("micro-batches", &flags->micro_batches, "Print a table of the micro-batches as well");
  list.add("json", &flags->json,
           "Print JSON: the plan, under `comparison` every strategy, and per micro-batch its "
           "trajectories and runs [begin, end, parent run] of forest tokens");
  return command;
}

}  // namespace espalier::cli
