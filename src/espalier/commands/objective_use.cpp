// SPDX-License-Identifier: Apache-2.0
// What data_flags.h declares and only LibTorch's half can tell.
#include <algorithm>

#include "espalier/base/check.h"
#include "espalier/base/messages.h"
#include "espalier/base/printable.h"
#include "espalier/commands/data_flags.h"
#include "espalier/model/weights/weights.h"
#include "espalier/objective/signal.h"

namespace espalier::commands {

DataUse data_use_of(const std::string& model, const ObjectiveOptions& objective) {
  DataUse use = data_use_of(model);
  ESPALIER_CHECK(
      model.empty() || use.routers.count() > 0 || !objective.has_router_losses(),
      "--router-aux-loss-coef, --router-z-loss-coef: expected a model with experts, received {} ({})",
      read_config(model).model_type, model);
  use.objective = to_string(objective.kind);
  use.reads = [fields = data_fields(*make_objective(objective))](Field field) {
    return std::ranges::find(fields, name_of(field)) != fields.end();
  };
  use.warnings = [objective](const Trajectories& rows) { return signal_warnings(Loss(rows, objective)); };
  return use;
}

void note_carried_tensors(const std::string& model) {
  const std::vector<std::string> names = carried_tensors(model);
  if (names.empty()) return;
  constexpr size_t kMost = 5;
  std::string list;
  for (size_t i = 0; i < std::min(kMost, names.size()); ++i)
    list += (i > 0 ? ", " : "") + shortened(names[i]);
  if (names.size() > kMost) list += fmt::format(" and {} more", names.size() - kMost);
  log_line("{}: tensors that the model does not use and checkpoints carry unchanged: {}", printable(model),
           list);
}

}  // namespace espalier::commands
