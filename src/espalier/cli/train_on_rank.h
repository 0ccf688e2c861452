// SPDX-License-Identifier: Apache-2.0
// `espalier train` as one of several ranks.
#pragma once

#include <string>
#include <vector>

#include "espalier/distributed/group.h"

namespace espalier::cli {

/// Runs `espalier train` with these arguments as a rank of a group, and gives the exit status. Rank 0 alone
/// writes the run's folder, and tells how it goes. `version`: the text of --version. Throws what the command
/// throws, UsageError included, on any rank; the caller lets the others know (distributed/process_group.h).
int train_on_rank(const std::vector<std::string>& arguments, const Group& group, const std::string& version);

}  // namespace espalier::cli
