// SPDX-License-Identifier: Apache-2.0
#include "espalier/commands/plan_of_model.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "espalier/base/file.h"
#include "espalier/commands/plan_summary.h"
#include "espalier/measure/device_options.h"
#include "espalier/measure/model_use.h"
#include "espalier/model/adapter.h"
#include "espalier/model/weights/tensor_bytes.h"
#include "espalier/plan/time_model.h"
#include "espalier/train/optimizer/optimizer.h"

namespace espalier::commands {
namespace {

ModelPlanner planner_of_model(const PlanArguments& flags) {
  const Machine machine = DeviceOptions{flags.device}.open();
  return
      [&flags, machine](const Trajectories& trajectories, StepOptions options, const PlanProgress& progress,
                        const std::function<void(const std::string&)>& note) {
        const KernelScope scope(machine.kernels);
        const DecoderConfig config = read_config(flags.model);
        const at::ScalarType dtype = parse_dtype(std::string(flags.dtype));
        const std::optional<LoraOptions> lora = flags.lora.trained(config);
        const at::ScalarType trained = trained_dtype(dtype, lora.has_value());
        const ModelUse use{.config = config,
                           .dtype = dtype,
                           .device = machine.device,
                           .optimizer_bytes = optimizer_bytes(flags.optimizer, trained),
                           .lora = lora};
        const PlanCosts costs = flags.planning.measured_costs(use, note);
        const PlanCosts compared_by = flags.planning.costs(use);
        options.costs = &compared_by;
        ModelPlan plan{
            .compared = compare_step_plans(trajectories, options, progress),
            .predictions = {},
            .rates = costs.time,
            .cost = use.cost(),
            .reduced_bytes = trained_parameters(costs.memory) * static_cast<double>(costs.memory.sum_bytes),
            .context_bytes_per_token =
                static_cast<double>(use.cost().context_per_token() * costs.memory.element_bytes),
            .rank_bytes = {}};
        PlanCosts divided = compared_by;
        divided.memory.optimizer_bytes_per_parameter =
            optimizer_bytes(flags.optimizer, trained, std::max<int64_t>(1, flags.ranks));
        plan.rank_bytes = [&trajectories, options, divided](const std::vector<int64_t>& rows,
                                                            int64_t context_parallel) mutable {
          divided.memory.context_parallel = context_parallel;
          StepOptions own = options;
          own.costs = &divided;
          const Step step = rows.empty() ? Step() : make_step(trajectories, rows, own);
          return std::max(resident_bytes(divided.memory), predict_step(divided, step).largest_peak_bytes());
        };
        if (!flags.save_cost_model.empty()) {
          write_text(flags.save_cost_model, cost_model_json(costs.time).dump(2) + "\n");
        }
        plan.predictions = predict_candidates(costs, &plan.compared);
        return plan;
      };
}

}  // namespace

PlanTools plan_tools() {
  return {planner_of_model, [](int threads) { at::set_num_threads(threads); }};
}

}  // namespace espalier::commands
