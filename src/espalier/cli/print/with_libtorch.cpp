// SPDX-License-Identifier: Apache-2.0
// What data_summary.h and data_flags.h declare and only LibTorch's half can tell.
#include <algorithm>

#include "espalier/base/output.h"
#include "espalier/base/printable.h"
#include "espalier/cli/flags/data_flags.h"
#include "espalier/cli/print/data_summary.h"
#include "espalier/model/weights/weights.h"
#include "espalier/objective/signal.h"

namespace espalier::cli {

bool objective_reads(const ObjectiveOptions& objective, Field field) {
  const std::vector<std::string> fields = data_fields(*make_objective(objective));
  return std::ranges::find(fields, name_of(field)) != fields.end();
}

std::vector<std::string> signal_warnings(const Trajectories& trajectories,
                                         const ObjectiveOptions& objective) {
  return espalier::signal_warnings(Loss(trajectories, objective));
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

}  // namespace espalier::cli
