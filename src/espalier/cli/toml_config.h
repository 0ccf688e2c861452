// SPDX-License-Identifier: Apache-2.0
// TOML files: --config FILE has the flags of a command; others have tables.
#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace espalier::cli {

/// Replaces `--config FILE` in the arguments of a subcommand (args[0] is its name) by the flags that the file
/// holds and the command line does not: a flag on the command line wins over the file, and a list over the
/// whole list there. Keys are the flags' names without the dashes; `_` may stand for `-`. Lists stand for
/// flags that take several values. Unknown keys, tables, a second --config and syntax errors throw InputError
/// with file:line.
std::vector<std::string> expand_config(const CLI::App& app, const std::vector<std::string>& args);

/// A table of a file.
struct FileTable {
  std::string where;              // "FILE:LINE"
  nlohmann::ordered_json values;  // by key: text, numbers, booleans, lists of them
};

/// The tables [[name]] of a file, which the flag named. Throws InputError with file:line for syntax errors, a
/// file that has other keys or no such table, and values of other kinds.
std::vector<FileTable> read_tables(const std::string& flag, const std::string& file, const std::string& name);

/// Makes the parser refuse a flag of `command` that is given twice, unless it takes several values: one of
/// two values would be lost without a word.
void refuse_repeated_flags(CLI::App* command);

/// All flags of a parsed subcommand with the values in force: numbers, booleans, text, and lists of text
/// where a flag without a delimiter was given several values. --help and --config are left out.
nlohmann::ordered_json resolved_flags(const CLI::App& command);

/// The same as TOML, fit for --config. Throws InputError for text that is not UTF-8, as names of files may
/// be.
std::string to_toml(const nlohmann::ordered_json& flags);

}  // namespace espalier::cli
