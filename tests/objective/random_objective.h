// SPDX-License-Identifier: Apache-2.0
// Objectives with random options.
#pragma once

#include <string>
#include <vector>

#include "espalier/base/rng.h"
#include "espalier/data/trajectories.h"
#include "espalier/objective/options.h"

namespace espalier::testing {

/// "sft", "ppo", "grpo", ...
std::vector<std::string> objective_names();

/// What --objective NAME sets.
ObjectiveOptions objective_named(const std::string& name);

/// Any objective with options that fit it, but for divergences in the reward, which most random rows do not
/// allow.
ObjectiveOptions random_objective(Rng& rng);

/// The same of one kind.
ObjectiveOptions random_objective(Rng& rng, ObjectiveKind kind);

/// Rows for the objective made of others: pairs with a reference for preferences, otherwise the rows
/// themselves, which must have advantages and log-probabilities of a reference where it reads them. A pair
/// has two different trajectories with tokens that carry loss.
Trajectories rows_for(const ObjectiveOptions& objective, const Trajectories& trajectories, Rng& rng);

/// For messages of tests.
std::string describe(const ObjectiveOptions& objective);

}  // namespace espalier::testing
