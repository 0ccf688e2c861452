// SPDX-License-Identifier: Apache-2.0
// A plan as numbers, to be sent from the process that made it to others.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/plan/plan.h"

namespace espalier {

/// All of the plan as integers, which unpack_plan reads back as an equal plan. The forest is not in it: every
/// process builds the same one from the same trajectories.
std::vector<int64_t> pack_plan(const Plan& plan);

/// The plan of a message for this forest. Throws InputError where the message is not one of pack_plan, is cut
/// off or longer, or names tokens, trajectories, runs or micro-batches that there are not.
Plan unpack_plan(std::span<const int64_t> message, const Forest& forest);

}  // namespace espalier
