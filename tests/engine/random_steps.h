// SPDX-License-Identifier: Apache-2.0
// Rows and plans at random, for tests of whole steps.
#pragma once

#include <string>

#include "espalier/base/rng.h"
#include "espalier/engine/step.h"
#include "tests/engine/tiny_models.h"

namespace espalier::testing {

/// Rows of a shape for a random objective. Where they have no log-probabilities of a behaviour policy, the
/// objective loses its importance weights. Distillation may get the reference's most likely tokens. Half of
/// the time rows have temperatures.
Trajectories random_rows_for(ObjectiveOptions* objective, Rng& rng, Shape shape, int vocab_size);

/// Of any strategy and way of checkpointing, with no token budget, the smallest one, or one between.
PlanOptions random_plan(Rng& rng, const Trajectories& trajectories);

std::string describe(const ObjectiveOptions& objective, const PlanOptions& plan, Family family, Shape shape);

}  // namespace espalier::testing
