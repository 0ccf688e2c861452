// SPDX-License-Identifier: Apache-2.0
// TOML files: --config FILE has the flags of a command; others have tables.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "espalier/cli/commands/command.h"

namespace espalier::cli {

/// The flags that a file holds, as names and texts. Keys are the flags' names without the dashes; `_` may
/// stand for `-`. Lists stand for flags that take several values. Unknown keys, tables and syntax errors
/// throw InputError with file:line.
NamedTexts read_config_file(const Command& command, const std::string& file);

/// A table of a file.
struct FileTable {
  std::string where;              // "FILE:LINE"
  nlohmann::ordered_json values;  // by key: text, numbers, booleans, lists of them
};

/// The tables [[name]] of a file, which the flag named. Throws InputError with file:line for syntax errors, a
/// file that has other keys or no such table, and values of other kinds.
std::vector<FileTable> read_tables(const std::string& flag, const std::string& file, const std::string& name);

/// All flags with the values in force (Option::kept).
nlohmann::ordered_json resolved_flags(const OptionList& options);

/// The same as TOML, fit for --config. Throws InputError for text that is not UTF-8, as names of files may
/// be.
std::string to_toml(const nlohmann::ordered_json& flags);

}  // namespace espalier::cli
