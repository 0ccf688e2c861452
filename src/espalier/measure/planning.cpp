// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/planning.h"

#include <algorithm>
#include <memory>

#include "espalier/engine/cost.h"
#include "espalier/measure/calibrate.h"
#include "espalier/measure/model_use.h"
#include "espalier/objective/objective.h"
#include "espalier/plan/planner.h"
#include "espalier/plan/time_model.h"

namespace espalier {

ModelCost ModelUse::cost() const {
  return lora ? with_adapters(model_cost(config), config, *lora) : model_cost(config);
}

namespace {

/// The memory model of the objective, or of all objectives of a mix.
MemoryModel memory_of(const ModelUse& use) {
  std::vector<std::shared_ptr<const Objective>> objectives;
  for (const MixSource& source : use.mix) objectives.push_back(make_objective(source.objective));
  if (objectives.empty()) objectives.push_back(make_objective(use.objective));
  std::vector<MemoryModel> models;
  for (const auto& objective : objectives) {
    models.push_back(memory_model(use.config, use.dtype, *objective, use.device, use.demand));
  }
  MemoryModel memory = largest(models);
  memory.optimizer_bytes_per_parameter = use.optimizer_bytes;
  memory.context_parallel = use.context_parallel;
  return memory;
}

}  // namespace

PlanCosts Planning::costs(const ModelUse& use) const {
  PlanCosts costs{cost_model.empty() ? assumed_times(use.config, use.device)
                                     : read_cost_model(cost_model, model_cost(use.config)),
                  memory_of(use)};
  if (!use.lora) return costs;
  return with_adapters(std::move(costs), use.config, *use.lora);
}

PlanCosts Planning::measured_costs(const ModelUse& use,
                                   const std::function<void(const std::string&)>& note) const {
  PlanCosts costs = this->costs(use);
  if (!no_calibration) {
    costs.time = cached_calibration(use.config, use.dtype, use.device, cache_folder(), note);
    costs.time.cost = use.cost();
  }
  return costs;
}

void Planning::judge_calibration(const ModelUse& use, double predicted_seconds, double measured_seconds,
                                 const std::function<void(const std::string&)>& note) const {
  constexpr double kMostOff = 1.5, kLeastSeconds = 0.25;  // shorter steps are mostly fixed costs
  if (no_calibration || std::max(predicted_seconds, measured_seconds) < kLeastSeconds) return;
  if (measured_seconds < kMostOff * predicted_seconds && predicted_seconds < kMostOff * measured_seconds)
    return;
  if (!forget_calibration(use.config, use.dtype, use.device, cache_folder())) return;
  note(fmt::format(
      "micro-batches took {:.2f} s, but {:.2f} s were predicted: the next run measures the machine "
      "again",
      measured_seconds, predicted_seconds));
}

}  // namespace espalier
