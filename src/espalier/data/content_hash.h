// SPDX-License-Identifier: Apache-2.0
// Hashes that tell whether two sets of trajectories are equal, whatever files they come from.
#pragma once

#include <map>
#include <string>

#include "espalier/data/trajectories.h"

namespace espalier {

/// The hashes (base/hash.h) of the columns present, by their names in docs/data-format.md: input_ids (with
/// the rows' lengths), loss_weights, logprobs, ref_logprobs, advantages, reward, chosen, group_id, pair_id,
/// routed_experts. JSON Lines and packed files of equal values have equal hashes. trajectory_id is left out,
/// because only messages use it.
std::map<std::string, std::string> content_hashes(const Trajectories& trajectories);

}  // namespace espalier
