// espalier plan: what would run together.
#include <numeric>
#include <optional>

#include "espalier/base/check.h"
#include "espalier/cli/commands.h"
#include "espalier/cli/flags.h"
#include "espalier/cli/plan_table.h"
#include "espalier/cli/progress.h"
#include "espalier/model/weights.h"
#include "espalier/plan/planner.h"
#include "espalier/train/batch.h"

namespace espalier::cli {

namespace {

struct Flags {
  DataFlags data;
  PlanFlags plan;
  DeviceFlags device;
  std::string model, dtype = "float32", optimizer = "adamw";
  bool json = false;
};

void run(const Flags& flags) {
  const at::Device device = flags.model.empty() ? at::Device(at::kCPU) : flags.device.open();
  const Trajectories trajectories = flags.data.read(vocab_size_of(flags.model));
  const PlanOptions options = flags.plan.options(trajectories);
  Step step;
  step.rows.resize(trajectories.num_rows());
  std::iota(step.rows.begin(), step.rows.end(), 0);
  step.forest = forest_of(trajectories, step.rows);
  std::optional<StepPrediction> prediction;
  if (flags.model.empty()) {
    step.plan = make_plan(step.forest, options);
  } else {
    Progress progress("plan");
    const ModelUse use{.config = read_config(flags.model),
                       .dtype = parse_dtype(flags.dtype),
                       .device = device,
                       .optimizer = parse_optimizer(flags.optimizer)};
    const PlanCosts costs = flags.plan.costs(use, [&](const std::string& text) { progress.line(text); });
    set_plan(&step, make_plan(step.forest, options, costs));
    step.terms = step_terms_or_all(trajectories, step.rows, step.forest, {});
    prediction = predict_step(costs, step);
  }
  const StepPrediction* shown = prediction ? &*prediction : nullptr;
  if (flags.json) {
    fmt::print("{}\n", plan_json(step.forest, step.plan, shown).dump(1));
  } else {
    fmt::print("{}", PlanTable{.forest = &step.forest, .plan = &step.plan, .prediction = shown}.text());
  }
}

}  // namespace

void add_plan(CLI::App& app, int*) {
  CLI::App* command = app.add_subcommand(
      "plan", "Print which trajectories run together, how many tokens are encoded, and what that takes");
  command->footer(
      "With --model, time and memory of every micro-batch are predicted, by rates that are measured once per "
      "machine and model, and --memory-budget may stand for --token-budget.\n"
      "Example: espalier plan --model DIR --data rows.jsonl --memory-budget 16GiB");
  auto flags = std::make_shared<Flags>();
  flags->data.add(command);
  add_model(command, &flags->model, "Hugging Face model folder: predicts time and memory");
  add_dtype(command, &flags->dtype, "Precision that is predicted for");
  flags->device.add(command, /*trains=*/false);
  command->add_option("--optimizer", flags->optimizer, "Whose state counts as memory: adamw or sgd")
      ->check(CLI::IsMember({"adamw", "sgd"}))
      ->capture_default_str();
  flags->plan.add(command);
  command->add_flag(
      "--json", flags->json,
      "Print JSON: per micro-batch its trajectories and runs [begin, end, parent run] of forest tokens");
  add_threads(command);
  add_config(command);
  command->callback([flags] { run(*flags); });
}

}  // namespace espalier::cli
