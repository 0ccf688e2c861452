// SPDX-License-Identifier: Apache-2.0
// The content of --help as data, which the program prints, and passes to shell completion and the manual
// page.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "espalier/cli/commands/commands.h"

namespace espalier::cli {

struct CommandText {
  std::string name;
  std::string summary;  // one sentence
  std::string closing;  // indented lines are not wrapped
  std::string group;    // heading in the help
  std::vector<OptionText> flags;
};

/// Hidden flags are left out.
CommandText command_text(const Command& command);

/// `espalier` itself, followed by its subcommands in their order.
std::vector<CommandText> command_texts(const std::deque<Command>& commands);

/// {"version": first line of `version`, "commands": command_texts} for the Python package
/// (commands/command_texts.py), which knows the flags of commands written in Python.
std::string commands_json(const std::deque<Command>& commands, const std::string& version);

}  // namespace espalier::cli
