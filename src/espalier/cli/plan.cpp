// SPDX-License-Identifier: Apache-2.0
// espalier plan: what would run together.
#include <optional>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/cli/commands.h"
#include "espalier/cli/flags.h"
#include "espalier/cli/output.h"
#include "espalier/cli/plan_table.h"
#include "espalier/cli/progress.h"
#include "espalier/cli/step_gains.h"
#include "espalier/engine/batch.h"
#include "espalier/measure/cost_model_file.h"
#include "espalier/model/weights.h"
#include "espalier/plan/planner.h"

namespace espalier::cli {

namespace {

struct Flags {
  DataFlags data;
  PlanFlags plan;
  DeviceFlags device;
  std::string model, dtype = "float32", optimizer = "adamw", save_cost_model;
  bool json = false;
};

void run(const Flags& flags) {
  ESPALIER_CHECK(!flags.model.empty() || flags.save_cost_model.empty(),
                 "--save-cost-model: rates are those of a model on this machine; give --model");
  const at::Device device = flags.model.empty() ? at::Device(at::kCPU) : flags.device.open();
  const Trajectories trajectories = flags.data.read(data_use_of(flags.model));
  const PlanOptions options = flags.plan.options(trajectories);
  Step step;
  std::optional<StepPrediction> prediction;
  StepFlops flops;
  if (flags.model.empty()) {
    step = make_step(trajectories, {.plan = options, .terms = TermChoice::kWithLossOrAll});
  } else {
    Progress progress("plan");
    const ModelUse use{.config = read_config(flags.model),
                       .dtype = parse_dtype(flags.dtype),
                       .device = device,
                       .optimizer = parse_optimizer(flags.optimizer)};
    const PlanCosts costs =
        flags.plan.measured_costs(use, [&](const std::string& text) { progress.line(text); });
    const PlanCosts compared_by = flags.plan.costs(use);
    step = make_step(trajectories,
                     {.plan = options, .costs = &compared_by, .terms = TermChoice::kWithLossOrAll});
    if (!flags.save_cost_model.empty()) {
      write_text(flags.save_cost_model, cost_model_json(costs.time).dump(2) + "\n");
    }
    prediction = predict_step(costs, step);
    flops.add(model_cost(use.config), step);
  }
  const Gains gains = flops.plan > 0 ? flops.gains() : token_gains(step.forest, step.plan);
  const StepPrediction* shown = prediction ? &*prediction : nullptr;
  if (flags.json) {
    print_output("{}\n", plan_json(step.forest, step.plan, shown, gains).dump(1));
  } else {
    print_output("{}{}", PlanTable{.forest = &step.forest, .plan = &step.plan, .prediction = shown}.text(),
                 gains_report(gains, !flags.model.empty()));
  }
}

}  // namespace

void add_plan(CLI::App& app, int*) {
  CLI::App* command = app.add_subcommand("plan",
                                         "Print which trajectories run together, how many tokens are "
                                         "encoded, and the time and memory this takes");
  command->footer(
      "With --model, time and memory of every micro-batch are predicted from rates that are measured once "
      "per machine and model, and --memory-budget can replace --token-budget. Plans are compared by built-in "
      "rates, or by --cost-model FILE.\nExample: espalier plan --model DIR --data rows.jsonl --memory-budget "
      "16GiB");
  auto flags = std::make_shared<Flags>();
  flags->data.add(command);
  add_model(command, &flags->model, "Hugging Face model folder, to predict time and memory");
  add_dtype(command, &flags->dtype, "Precision to predict for");
  flags->device.add(command, /*trains=*/false);
  command
      ->add_option("--optimizer", flags->optimizer,
                   "Optimiser whose state is counted as memory: adamw or sgd")
      ->check(CLI::IsMember(optimizer_names()))
      ->capture_default_str();
  flags->plan.add(command);
  command
      ->add_option("--save-cost-model", flags->save_cost_model,
                   "Write the rates behind the predicted times to this file. With --cost-model, plans are "
                   "then compared by these measured rates")
      ->type_name("FILE");
  command->add_flag(
      "--json", flags->json,
      "Print JSON: per micro-batch its trajectories and runs [begin, end, parent run] of forest tokens");
  add_threads(command);
  add_config(command);
  command->callback([flags] { run(*flags); });
}

}  // namespace espalier::cli
