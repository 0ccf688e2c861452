// --config FILE: a TOML file with the flags of a command.
#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace espalier::cli {

/// Replaces `--config FILE` in the arguments of a subcommand (args[0] is its name) by the flags that the file
/// holds, put first so that flags on the command line win. Keys are the flags' names without the dashes; `_`
/// may stand for `-`. Unknown keys, tables and syntax errors throw InputError with file:line.
std::vector<std::string> expand_config(const CLI::App& app, const std::vector<std::string>& args);

/// All flags of a parsed subcommand with the values in force: numbers, booleans and text. --help and --config
/// are left out.
nlohmann::ordered_json resolved_flags(const CLI::App& command);

/// The same as TOML, fit for --config.
std::string to_toml(const nlohmann::ordered_json& flags);

}  // namespace espalier::cli
