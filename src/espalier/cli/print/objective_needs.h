// SPDX-License-Identifier: Apache-2.0
// What objectives need of data. It takes LibTorch: the program without it has no command with an objective.
#pragma once

#include <string>
#include <vector>

#include "espalier/data/fields.h"
#include "espalier/data/trajectories.h"
#include "espalier/objective/options.h"

namespace espalier::cli {

bool objective_reads(const ObjectiveOptions& objective, Field field);
bool objective_reads_old_logprobs(const ObjectiveOptions& objective);

/// What makes the gradient weaker than one may expect, a line each (objective/signal.h).
std::vector<std::string> signal_warnings(const Trajectories& trajectories, const ObjectiveOptions& objective);

}  // namespace espalier::cli
