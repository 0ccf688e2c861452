// SPDX-License-Identifier: Apache-2.0
// Groups of torch.distributed.
#pragma once

#include <memory>
#include <string>

namespace espalier {

class Group;

/// The process group that Python has registered under this name (ProcessGroup.group_name). It must serve
/// tensors on the CPU, and those of the device that trains. Throws InputError if there is none.
std::unique_ptr<Group> process_group(const std::string& name);

/// From now on collectives of this process throw RankError with this message, those that wait among them.
/// Called by the thread that watches the other ranks.
void fail_ranks(const std::string& message);

/// Whether a collective waits for other ranks.
bool waits_for_ranks();

}  // namespace espalier
