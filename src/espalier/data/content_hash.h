// SPDX-License-Identifier: Apache-2.0
// Whether two sets of trajectories are the same, whatever files they came from.
#pragma once

#include <map>
#include <string>

#include "espalier/data/trajectories.h"

namespace espalier {

/// Hashes (base/hash.h) of the columns that the trajectories have, by their names in docs/data-format.md:
/// input_ids (with the rows' lengths), loss_weights, logprobs, ref_logprobs, advantages, reward, chosen,
/// group_id, pair_id, routed_experts. Values are hashed as the numbers that they are read as, so JSON Lines
/// and packed files of equal content have equal hashes. trajectory_id is left out, because it is only a name
/// for messages.
std::map<std::string, std::string> content_hashes(const Trajectories& trajectories);

}  // namespace espalier
