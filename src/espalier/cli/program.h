// SPDX-License-Identifier: Apache-2.0
// `espalier` from its arguments to its exit status.
#pragma once

#include <exception>
#include <functional>
#include <string>

namespace espalier::cli {

/// Runs the command that the arguments name, and tells what fails on standard error; gives the exit status.
/// `message_of`: what is said of exceptions that are neither UsageError nor InputError, fit for a terminal.
int run_program(int argc, char** argv, const std::function<std::string(const std::exception&)>& message_of);

}  // namespace espalier::cli
