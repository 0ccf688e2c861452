// SPDX-License-Identifier: Apache-2.0
// What --help says, as data: shell completion and the manual page are written from it.
#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

namespace espalier::cli {

/// The file names that the value of a flag may be completed to.
enum class PathKind { kNone, kFile, kFolder };

/// A flag, or an argument that stands without one.
struct FlagText {
  std::vector<std::string> names;  // such as -o and --out, short ones first; none: an argument without a flag
  std::string value;               // what stands for its value, such as FILE; empty: it takes none
  std::vector<std::string> words;  // the values that it accepts, where they are words
  std::string default_value;       // empty: none, or told by the help
  std::string help;
  std::string group;  // of flags that stand together in the help
  PathKind path = PathKind::kNone;
  bool required = false;
  bool several = false;  // several values may follow it
};

struct CommandText {
  std::string name;
  std::string summary;      // one sentence
  std::string description;  // more of it, or empty. Here as in `closing` a line that is set in keeps its form
  std::string closing;
  std::vector<FlagText> flags;
};

FlagText flag_text(const CLI::Option& option);

/// `espalier` itself, followed by its subcommands in their order. Flags that help hides are left out.
std::vector<CommandText> command_texts(const CLI::App& app);

/// What --help of each command that Python runs says, as JSON by its name. The build makes its source
/// (cmake/WritePythonFlags.cmake) from the declarations in python/espalier/arguments.py and io/arguments.py.
extern const char* const kPythonFlags;

}  // namespace espalier::cli
