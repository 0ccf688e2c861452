// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "espalier/measure/planning.h"

namespace espalier {

void Planning::add(OptionList* list, bool predicts) {
  add_plan_options(&plan, list);
  if (predicts) {
    list->add("no-calibration", &no_calibration,
              "Predict times by built-in rates, without measuring this machine or GPU");
  }
  list->add(
      "cost-model", &cost_model,
      "Compare plans by the rates in this file instead of built-in ones. `plan --save-cost-model` writes "
      "such a file, and a run saves one as cost_model.json, which --resume uses. Plans never depend on "
      "measurements of the run, so runs with equal flags and data are bitwise identical",
      {.path = PathKind::kFile});
}

PlanOptions Planning::options(const Trajectories& trajectories) const {
  PlanOptions options = plan;
  if (plan.token_budget == 0 && plan.memory_budget == 0) {
    options.token_budget = kDefaultTokenBudget;
    for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
      options.token_budget = std::max(options.token_budget, trajectories.row_size(row));
    }
  }
  return options;
}

}  // namespace espalier
