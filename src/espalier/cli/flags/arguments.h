// SPDX-License-Identifier: Apache-2.0
// Arguments of a command, which set its options. Its source alone knows CLI11.
#pragma once

#include <string>
#include <vector>

#include "espalier/cli/commands/command.h"

namespace espalier::cli {

/// Sets the options of a command by its arguments, and by the TOML file of --config: a flag on the command
/// line wins over the file, and a list over the whole list there. Returns false, and sets nothing, where they
/// ask for help. Throws UsageError naming the flag, also where one that takes a single value is given twice:
/// one of two would be lost without a word.
bool set_options(Command* command, const std::vector<std::string>& arguments);

}  // namespace espalier::cli
