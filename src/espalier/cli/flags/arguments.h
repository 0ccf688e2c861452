// SPDX-License-Identifier: Apache-2.0
// Parses the arguments of a command into its options. Only its source uses CLI11.
#pragma once

#include <string>
#include <vector>

#include "espalier/cli/commands/commands.h"

namespace espalier::cli {

/// Sets the options of a command from its arguments and the TOML file of --config. A flag on the command line
/// overrides the file; a list replaces the whole list there. Returns false, and sets nothing, if the
/// arguments ask for help. Throws UsageError naming the flag, also if a flag with a single value is given
/// twice.
bool set_options(Command* command, const std::vector<std::string>& arguments);

}  // namespace espalier::cli
