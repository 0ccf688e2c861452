// SPDX-License-Identifier: Apache-2.0
// The share of a step that one of several ranks trains on.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/distributed/group.h"
#include "espalier/engine/step.h"
#include "espalier/objective/loss.h"

namespace espalier {

/// The trajectories of each rank, ascending, by predicted seconds (plan/ranks.h). Trajectories of one unit of
/// the loss (a group, a pair, the step) and those that share a target with SharedTargets::kOnce stay
/// together; a rank may have none. Without such units, trees are split into branches where that is faster.
/// `step`: needs no plan.
std::vector<std::vector<int64_t>> divide_step(const Step& step, const Loss& loss, const StepOptions& options,
                                              int64_t ranks);

/// The step of these trajectories of a whole step, with their terms as they are there, normalisers included.
/// It has no plan.
Step share_of(Step whole, const std::vector<int64_t>& trajectories, const Loss& loss,
              const StepOptions& options);

/// What make_step makes of the rows of all ranks, the share of this rank alone: the whole step for one
/// process. The ranks of options.context_group, successive ones of `group`, have the same share, and divide
/// its micro-batches. Talks to nobody: all ranks divide the step in the same way.
Step make_share(const Loss& loss, std::vector<int64_t> rows, const StepOptions& options, const Group& group);

}  // namespace espalier
