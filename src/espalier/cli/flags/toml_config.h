// SPDX-License-Identifier: Apache-2.0
// TOML files: --config FILE has the flags of a command; others have tables.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "espalier/cli/commands/commands.h"

namespace espalier::cli {

/// The flags in a file, as names and texts. Keys are the flags' names without dashes, with `_` or `-`. Lists
/// are for flags that take several values. Unknown keys, tables and syntax errors throw InputError with
/// file:line.
NamedTexts read_config_file(const Command& command, const std::string& file);

/// A table of a file.
struct FileTable {
  std::string where;              // "FILE:LINE"
  nlohmann::ordered_json values;  // by key: text, numbers, booleans, lists of them
};

/// The tables [[name]] of the file given by `flag`. Throws InputError with file:line for syntax errors, a
/// file with other keys or without such a table, and values of other types.
std::vector<FileTable> read_tables(const std::string& flag, const std::string& file, const std::string& name);

/// All flags with their resolved values (Option::kept).
nlohmann::ordered_json resolved_flags(const OptionList& options);

/// The flags as TOML for --config. Throws InputError for text that is not UTF-8, such as some file names.
std::string to_toml(const nlohmann::ordered_json& flags);

}  // namespace espalier::cli
