// SPDX-License-Identifier: Apache-2.0
// Suggestions for unknown commands and flags.
#pragma once

#include <deque>
#include <span>
#include <string>
#include <vector>

#include "espalier/cli/commands/commands.h"

namespace espalier::cli {

/// The word of `known` with the fewest edits from `given`, if they are fewer than half its letters; otherwise
/// "".
std::string nearest_word(const std::string& given, std::span<const std::string> known);

/// "; did you mean --learning-rate?" for the flag of a command that `name` (without dashes) is similar to, or
/// that other trainers call by this name; "" if there is none.
std::string suggested_flag(const Command& command, const std::string& name);

/// A message about the first unknown command or flag in the arguments of the program (args[0] is the
/// command): "unknown flag --lr of `espalier train`; did you mean --learning-rate?". "" if all are known, and
/// for commands that pass their arguments on.
std::string unknown_word(const std::deque<Command>& commands, const std::vector<std::string>& args);

}  // namespace espalier::cli
