// SPDX-License-Identifier: Apache-2.0
// Inputs of the routers of a mixture of experts: multiplicities and recorded routes of tokens.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "espalier/config/router_shape.h"
#include "espalier/data/trajectories.h"
#include "espalier/engine/batch.h"
#include "espalier/engine/step.h"

namespace espalier {

/// Sets batch->multiplicity: for each token of micro-batch `index`, the number of trajectories placed there
/// that pass it. A token in several micro-batches counts in each for those placed there, so that the sum over
/// the step is its number of flat tokens. Sets batch->routes if the data record them. Tensors are on the
/// host.
void set_router_inputs(const Step& step, int64_t index, const Trajectories& trajectories,
                       const RouterShape& routers, Batch* batch);

/// The recorded routes of `size` tokens from `first_token` (flat index), [size * routes_per_token]; ascending
/// per router (or layer).
std::vector<int64_t> recorded_routes(const Trajectories& trajectories, int64_t first_token, int64_t size,
                                     const RouterShape& routers);

/// Throws InputError unless recorded routes, if any, fit a model with these routers in `num_layers` layers:
/// the number per token, valid experts, each at most once per token and router. Does nothing for a model
/// without routers. `where`: the file, for the message.
void check_recorded_routes(const std::string& where, const Trajectories& trajectories,
                           const RouterShape& routers, int64_t num_layers);

}  // namespace espalier
