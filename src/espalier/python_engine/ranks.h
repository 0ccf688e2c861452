// SPDX-License-Identifier: Apache-2.0
// Training on several ranks, which are processes of Python, without LibTorch headers.
#pragma once

#include <string>
#include <vector>

namespace espalier::python_engine {

/// Runs `espalier train` with these arguments as a rank of a process group of torch.distributed, by its name.
/// `version`: for the run's record. Returns the exit status. Throws where the run fails on this rank, or is
/// failed by fail_ranks.
int train_on_rank(const std::vector<std::string>& arguments, const std::string& process_group,
                  const std::string& version);

/// See distributed/process_group.h.
void fail_ranks(const std::string& message);
bool waits_for_ranks();

}  // namespace espalier::python_engine
