// SPDX-License-Identifier: Apache-2.0
// Groups of torch.distributed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace espalier {

class Group;

/// Makes process groups of so many successive ranks, and gives the name of that of this rank. A collective.
using SplitRanks = std::function<std::string(int64_t ranks)>;

/// The process group that Python has registered under this name (ProcessGroup.group_name). It must serve
/// tensors on the CPU, and those of the device that trains. `split`: for Group::split. Throws InputError if
/// there is none.
std::unique_ptr<Group> process_group(const std::string& name, SplitRanks split = {});

/// From now on collectives of this process throw RankError with this message, those that wait among them.
/// Called by the thread that watches the other ranks.
void fail_ranks(const std::string& message);

/// Whether a collective waits for other ranks.
bool waits_for_ranks();

}  // namespace espalier
