// SPDX-License-Identifier: Apache-2.0
// What the routers of a mixture of experts are told of a micro-batch's tokens.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "espalier/config/router_shape.h"
#include "espalier/data/trajectories.h"
#include "espalier/engine/batch.h"
#include "espalier/engine/step.h"

namespace espalier {

/// For a model with `routers`. Sets batch->multiplicity: of each token of micro-batch `index`, the
/// trajectories placed there that pass it. A token that lies in several micro-batches counts in each for
/// those placed there, so that the sum over the step is the number of its flat tokens. Sets batch->routes
/// where the data record them. On the host.
void set_router_inputs(const Step& step, int64_t index, const Trajectories& trajectories,
                       const RouterShape& routers, Batch* batch);

/// The recorded routes of `size` tokens from `first_token` (flat index) on, [size * routes_per_token]; those
/// of each router (or layer) ascending.
std::vector<int64_t> recorded_routes(const Trajectories& trajectories, int64_t first_token, int64_t size,
                                     const RouterShape& routers);

/// Throws InputError unless the recorded routes, if there are any, are of a model with these routers in
/// `num_layers` layers: as many for each token, of experts that there are, each at most once for a token and
/// router. A model without routers does not read them. `where`: the file, for the message.
void check_recorded_routes(const std::string& where, const Trajectories& trajectories,
                           const RouterShape& routers, int64_t num_layers);

}  // namespace espalier
