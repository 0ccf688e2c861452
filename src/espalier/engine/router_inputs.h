// SPDX-License-Identifier: Apache-2.0
// Inputs of the routers of a mixture of experts: multiplicities and recorded routes of tokens.
#pragma once

#include <cstdint>

#include "espalier/config/router_shape.h"
#include "espalier/data/trajectories.h"
#include "espalier/engine/batch.h"
#include "espalier/engine/recorded_routes.h"
#include "espalier/engine/step.h"

namespace espalier {

/// Sets batch->multiplicity: for each token of micro-batch `index`, the number of trajectories placed there
/// that pass it. A token in several micro-batches counts in each for those placed there, so that the sum over
/// the step is its number of flat tokens. Sets batch->routes if the data record them. Tensors are on the
/// host.
void set_router_inputs(const Step& step, int64_t index, const Trajectories& trajectories,
                       const RouterShape& routers, Batch* batch);

}  // namespace espalier
