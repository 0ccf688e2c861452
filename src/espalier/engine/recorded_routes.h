// SPDX-License-Identifier: Apache-2.0
// The experts that data record for their tokens.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "espalier/config/layer_spec.h"
#include "espalier/data/trajectories.h"

namespace espalier {

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
