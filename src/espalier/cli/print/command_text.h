// SPDX-License-Identifier: Apache-2.0
// The content of --help as data, from which help, shell completion and the manual page are written.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "espalier/cli/commands/commands.h"

namespace espalier::cli {

struct CommandText {
  std::string name;
  std::string summary;      // one sentence
  std::string description;  // may be empty; here and in `closing` indented lines are not wrapped
  std::string closing;
  std::string group;  // heading in the help
  std::vector<OptionText> flags;
};

/// Hidden flags are left out.
CommandText command_text(const Command& command);

/// `espalier` itself, followed by its subcommands in their order.
std::vector<CommandText> command_texts(const std::deque<Command>& commands);

/// The help of the commands written in Python, as JSON by command name. The build generates its source
/// (cmake/WritePythonFlags.cmake) from commands/arguments.py and io/arguments.py of python/espalier.
extern const char* const kPythonFlags;

}  // namespace espalier::cli
