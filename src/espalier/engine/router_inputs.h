// SPDX-License-Identifier: Apache-2.0
// What the routers of a mixture of experts are told of a micro-batch's tokens.
#pragma once

#include <cstdint>

#include "espalier/config/router_shape.h"
#include "espalier/data/trajectories.h"
#include "espalier/engine/batch.h"
#include "espalier/engine/recorded_routes.h"
#include "espalier/engine/step.h"

namespace espalier {

/// For a model with `routers`. Sets batch->multiplicity: of each token of micro-batch `index`, the
/// trajectories placed there that pass it. A token that lies in several micro-batches counts in each for
/// those placed there, so that the sum over the step is the number of its flat tokens. Sets batch->routes
/// where the data record them. On the host.
void set_router_inputs(const Step& step, int64_t index, const Trajectories& trajectories,
                       const RouterShape& routers, Batch* batch);

}  // namespace espalier
