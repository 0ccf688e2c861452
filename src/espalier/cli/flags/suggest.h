// SPDX-License-Identifier: Apache-2.0
// Commands and flags that do not exist: what was probably meant.
#pragma once

#include <deque>
#include <span>
#include <string>
#include <vector>

#include "espalier/cli/commands/command.h"

namespace espalier::cli {

/// The word of `known` that differs from `given` by the fewest edits, where that is less than half of it; ""
/// otherwise.
std::string nearest_word(const std::string& given, std::span<const std::string> known);

/// "; did you mean --learning-rate?" for the flag of a command that `name` (without dashes) is probably meant
/// to be, or that other trainers call so; "" where there is none.
std::string suggested_flag(const Command& command, const std::string& name);

/// What is wrong with the first unknown command or flag in the arguments of the program (args[0] is the
/// command), with a suggestion: "unknown flag --lr of `espalier train`; did you mean --learning-rate?". ""
/// where all are known, and for commands that take the arguments of another program.
std::string unknown_word(const std::deque<Command>& commands, const std::vector<std::string>& args);

}  // namespace espalier::cli
