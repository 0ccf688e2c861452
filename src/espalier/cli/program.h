// SPDX-License-Identifier: Apache-2.0
// `espalier` from its arguments to its exit status.
#pragma once

#include <exception>
#include <functional>
#include <string>
#include <vector>

namespace espalier::cli {

/// Runs the command that the arguments name, and tells what fails on standard error; gives the exit status.
/// `message_of`: what is said of exceptions that are neither UsageError nor InputError, fit for a terminal.
int run_program(int argc, char** argv, const std::function<std::string(const std::exception&)>& message_of);

/// Makes this process one of a command, as one that is not the program has to be. `tells`: whether its output
/// is written.
void prepare_command(bool tells);

/// Runs `espalier train` or verify, as the first of the arguments says, as a rank of
/// a process group of torch.distributed, by its name, and gives the exit status, once all ranks have come to
/// their end. Rank 0 alone writes files, and tells how it goes. `version`: the text of --version.
/// `split_ranks`: as of espalier::process_group. Throws
/// where the run fails on this rank, or is failed by fail_ranks; the caller lets the others know
/// (distributed/process_group.h).
int run_on_rank(const std::vector<std::string>& arguments, const std::string& process_group,
                const std::string& version, const std::function<std::string(int64_t ranks)>& split_ranks);

}  // namespace espalier::cli
