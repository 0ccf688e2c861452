// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/print/data_summary.h"

#include <algorithm>

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

}  // namespace espalier::cli
