// SPDX-License-Identifier: Apache-2.0
// What --help says, as data: help, shell completion and the manual page are written from it.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "espalier/cli/commands/command.h"

namespace espalier::cli {

struct CommandText {
  std::string name;
  std::string summary;      // one sentence
  std::string description;  // more of it, or empty. Here as in `closing` a line that is set in keeps its form
  std::string closing;
  std::string group;  // of commands that stand together
  std::vector<OptionText> flags;
};

/// Flags that help hides are left out.
CommandText command_text(const Command& command);

/// `espalier` itself, followed by its subcommands in their order.
std::vector<CommandText> command_texts(const std::deque<Command>& commands);

/// What --help of each command that Python runs says, as JSON by its name. The build makes its source
/// (cmake/WritePythonFlags.cmake) from the declarations in commands/arguments.py and io/arguments.py of
/// python/espalier.
extern const char* const kPythonFlags;

}  // namespace espalier::cli
