// SPDX-License-Identifier: Apache-2.0
// espalier logprobs: log-probabilities of every token, from the shared trees.
#include <cmath>
#include <limits>

#include <nlohmann/json.hpp>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/units.h"
#include "espalier/cli/commands.h"
#include "espalier/cli/flags.h"
#include "espalier/cli/help_format.h"
#include "espalier/cli/lora_flags.h"
#include "espalier/cli/output.h"
#include "espalier/cli/progress.h"
#include "espalier/cli/validators.h"
#include "espalier/engine/engine.h"
#include "espalier/measure/cost.h"
#include "espalier/model/adapter_folder.h"
#include "espalier/plan/planner.h"
#include "espalier/sample/mismatch.h"

namespace espalier::cli {
namespace {

constexpr double kLeastTemperature = 1e-3;

struct LogprobsArguments {
  DataFlags data;
  PlanFlags plan;
  DeviceFlags device;
  std::string model, adapter, out, dtype = "float32";
  double temperature = 1;
};

void run_logprobs(const LogprobsArguments& flags) {
  const at::Device device = flags.device.open();
  const at::ScalarType dtype = parse_dtype(flags.dtype);
  const Trajectories trajectories = flags.data.read(data_use_of(flags.model));
  note_carried_tensors(flags.model);
  const Decoder decoder = load_adapted(flags.model, flags.adapter, dtype, device);
  const PlanCosts costs{
      assumed_times(decoder.config(), device),
      memory_model(decoder.config(), dtype, std::nullopt, *make_objective(ObjectiveOptions{}), device)};
  const Step step = make_step(
      trajectories, {.plan = flags.plan.options(trajectories), .costs = &costs, .terms = TermChoice::kAll});
  std::vector<double> logprobs(trajectories.num_tokens(), std::numeric_limits<double>::quiet_NaN());
  Progress progress("logprobs");
  compute_logprobs(AtTemperature(decoder, flags.temperature), trajectories, step, &logprobs,
                   [&](int64_t done, int64_t total) {
                     progress.update(static_cast<double>(done) / static_cast<double>(total));
                   });

  AtomicFile file(flags.out);
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    const bool named = !trajectories.trajectory_id.empty() && !trajectories.trajectory_id[row].empty();
    const nlohmann::json id = named ? nlohmann::json(trajectories.trajectory_id[row]) : nlohmann::json(row);
    std::string line = fmt::format("{{\"trajectory_id\":{},\"logprobs\":[null", id.dump());
    for (int64_t t = 1; t < trajectories.row_size(row); ++t) {
      const double value = logprobs[trajectories.offsets[row] + t];
      ESPALIER_CHECK(std::isfinite(value),
                     "trajectory {}: the log-probability of token {} is {}: expected a finite number",
                     trajectories.name(row), t, value);
      // Float32 values are printed with the digits that they have.
      line +=
          dtype == at::kDouble ? fmt::format(",{}", value) : fmt::format(",{}", static_cast<float>(value));
    }
    line += "]}\n";
    file.write(line);
  }
  file.commit();
  print_output(
      "{}: {}, {} from {} encoded\n", printable(flags.out), count_of(trajectories.num_rows(), "row", "rows"),
      count_of(trajectories.num_tokens(), "flat token", "flat tokens"), with_commas(step.plan.num_tokens()));
}

}  // namespace

void add_logprobs(CLI::App& app, int*) {
  CLI::App* command = app.add_subcommand(
      "logprobs",
      "Write the log-probability of every token given all before it, computed on the shared trees");
  auto flags = std::make_shared<LogprobsArguments>();
  add_model(command, &flags->model)->required();
  add_adapter(command, &flags->adapter, "An adapter of the model, a folder of PEFT");
  flags->data.add(command);
  {
    const HelpGroup group(command, kOutputGroup);
    command
        ->add_option("-o,--out", flags->out,
                     "JSONL to write: trajectory_id (or row number), logprobs (the first null)")
        ->type_name("FILE")
        ->required();
  }
  add_dtype(command, &flags->dtype, "Precision to compute in");
  {
    const HelpGroup group(command, kDataGroup);
    command
        ->add_option("--temperature", flags->temperature,
                     "Divide logits by this: of rows that were sampled at another temperature than 1")
        ->check(real_from(kLeastTemperature))
        ->capture_default_str();
  }
  flags->device.add(command, /*trains=*/false);
  flags->plan.add(command);
  add_threads(command);
  add_config(command);
  command->callback([flags] { run_logprobs(*flags); });
}

}  // namespace espalier::cli
