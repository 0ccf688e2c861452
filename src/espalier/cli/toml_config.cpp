// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/toml_config.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <system_error>

#include "espalier/base/check.h"
#include "espalier/base/utf8.h"
#include "espalier/cli/suggest.h"
#include "espalier/cli/toml_header.h"

namespace espalier::cli {
namespace {

std::string place(const std::string& file, const toml::source_region& source) {
  return fmt::format("{}:{}", file, source.begin.line);
}

std::string scalar_text(const toml::node& node, const std::string& where, const std::string& key) {
  if (const auto value = node.value_exact<std::string>()) return *value;
  if (const auto value = node.value_exact<int64_t>()) return fmt::format("{}", *value);
  if (const auto value = node.value_exact<double>()) return fmt::format("{}", *value);
  if (const auto value = node.value_exact<bool>()) return *value ? "true" : "false";
  throw InputError(fmt::format("{}: key `{}`: expected text, a number, true or false", where, key));
}

// Whether an option takes a list whose values are given one by one, not with a delimiter between them.
bool takes_several_values(const CLI::Option& option) {
  return option.get_items_expected_max() > 1 && option.get_delimiter() == '\0';
}

// A key of the file as arguments: one of them, or one for each value of a list.
std::vector<std::string> arguments_of(const CLI::Option& option, const std::string& key,
                                      const toml::node& node, const std::string& where) {
  const toml::array* array = node.as_array();
  if (array == nullptr) return {fmt::format("--{}={}", key, scalar_text(node, where, key))};
  ESPALIER_CHECK(option.get_items_expected_max() > 1, "{}: key `{}`: expected one value, received a list",
                 where, key);
  std::vector<std::string> values;
  for (const toml::node& part : *array) values.push_back(scalar_text(part, where, key));
  if (!takes_several_values(option)) return {fmt::format("--{}={}", key, fmt::join(values, ","))};
  for (std::string& value : values) value = fmt::format("--{}={}", key, value);
  return values;
}

// Whether the argument is this option, whatever follows in it: --out, --out=x, -o, -ox.
bool gives(const std::string& argument, const CLI::Option& option) {
  const auto is_long = [&](const std::string& name) {
    return argument == "--" + name || argument.starts_with("--" + name + "=");
  };
  const auto is_short = [&](const std::string& name) { return argument.starts_with("-" + name); };
  return std::any_of(option.get_lnames().begin(), option.get_lnames().end(), is_long) ||
         std::any_of(option.get_snames().begin(), option.get_snames().end(), is_short);
}

toml::table read_toml(const std::string& flag, const std::string& file) {
  if (!std::ifstream(file)) {
    throw InputError(
        fmt::format("{}: cannot open {}: {}", flag, file, std::generic_category().message(errno)));
  }
  toml::parse_result result = toml::parse_file(file);
  if (!result) {
    const toml::parse_error& error = result.error();
    throw InputError(fmt::format("{}: {}", place(file, error.source()), error.description()));
  }
  return std::move(result).table();
}

// The flags that the file holds and `given`, the rest of the command line, does not.
std::vector<std::string> read_flags(const CLI::App& command, const std::string& file,
                                    const std::vector<std::string>& given) {
  std::vector<std::string> flags;
  for (const auto& [raw_key, node] : read_toml("--config", file)) {
    std::string key(raw_key.str());
    const std::string where = place(file, node.source());
    std::replace(key.begin(), key.end(), '_', '-');
    const CLI::Option* option =
        key == "config" || key == "help" ? nullptr : command.get_option_no_throw("--" + key);
    ESPALIER_CHECK(option != nullptr, "{}: unknown key `{}`: expected a flag of `espalier {}` (see --help){}",
                   where, key, command.get_name(), suggested_flag(command, key));
    ESPALIER_CHECK(!node.is_table(), "{}: key `{}`: expected a value, received a table", where, key);
    std::vector<std::string> arguments = arguments_of(*option, key, node, where);
    if (std::any_of(given.begin(), given.end(),
                    [&](const std::string& each) { return gives(each, *option); }))
      continue;
    std::move(arguments.begin(), arguments.end(), std::back_inserter(flags));
  }
  return flags;
}

}  // namespace

namespace {

nlohmann::ordered_json json_of(const toml::node& node, const std::string& where, const std::string& key) {
  if (const auto value = node.value_exact<std::string>()) return *value;
  if (const auto value = node.value_exact<int64_t>()) return *value;
  if (const auto value = node.value_exact<double>()) return *value;
  if (const auto value = node.value_exact<bool>()) return *value;
  const toml::array* array = node.as_array();
  ESPALIER_CHECK(array != nullptr, "{}: key `{}`: expected text, a number, true, false or a list", where,
                 key);
  auto list = nlohmann::ordered_json::array();
  for (const toml::node& part : *array) list.push_back(json_of(part, where, key));
  return list;
}

}  // namespace

std::vector<FileTable> read_tables(const std::string& flag, const std::string& file,
                                   const std::string& name) {
  const toml::table root = read_toml(flag, file);
  for (const auto& [key, node] : root) {
    ESPALIER_CHECK(key.str() == name && node.is_array_of_tables(),
                   "{}: unknown key `{}`: expected tables [[{}]]", place(file, node.source()), key.str(),
                   name);
  }
  ESPALIER_CHECK(!root.empty(), "{}: expected tables [[{}]], received none", file, name);
  std::vector<FileTable> tables;
  for (const toml::node& node : *root.get_as<toml::array>(name)) {
    FileTable& table = tables.emplace_back(FileTable{place(file, node.source()), {}});
    table.values = nlohmann::ordered_json::object();
    for (const auto& [key, value] : *node.as_table()) {
      const std::string text(key.str());
      table.values[text] = json_of(value, place(file, value.source()), text);
    }
  }
  return tables;
}

std::vector<std::string> expand_config(const CLI::App& app, const std::vector<std::string>& args) {
  if (args.empty()) return args;
  const auto named = app.get_subcommands([&](const CLI::App* each) { return each->get_name() == args[0]; });
  // `init` has a --config of its own, a model's config.json, which is required there.
  if (named.empty() || named[0]->get_option_no_throw("--config") == nullptr) return args;
  const CLI::App* command = named[0];
  if (command->get_option("--config")->get_required()) return args;
  std::optional<std::string> file;
  std::vector<std::string> rest;
  for (size_t i = 1; i < args.size(); ++i) {
    const bool apart = args[i] == "--config";
    if (!apart && !args[i].starts_with("--config=")) {
      rest.push_back(args[i]);
      continue;
    }
    ESPALIER_CHECK(!apart || i + 1 < args.size(), "--config: expected a file name");
    const std::string name = apart ? args[++i] : args[i].substr(std::string_view("--config=").size());
    ESPALIER_CHECK(!file, "--config was given twice: {} and {}", *file, name);
    file = name;
  }
  std::vector<std::string> expanded{args[0]};
  if (file) {
    std::vector<std::string> flags = read_flags(*command, *file, rest);
    std::move(flags.begin(), flags.end(), std::back_inserter(expanded));
  }
  expanded.insert(expanded.end(), rest.begin(), rest.end());
  return expanded;
}

void refuse_repeated_flags(CLI::App* command) {
  command->parse_complete_callback([command] {
    for (const CLI::Option* option : command->get_options()) {
      const std::vector<std::string>& results = option->results();
      if (option->get_items_expected_max() > 1 || results.size() < 2) continue;
      const bool is_flag = option->get_items_expected_max() == 0;
      throw CLI::ArgumentMismatch(
          is_flag ? fmt::format("{} was given twice", option->get_name())
                  : fmt::format("{} was given twice: {} and {}", option->get_name(), results[0], results[1]));
    }
  });
}

namespace {

bool is_number(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  return type.starts_with("INT") || type.starts_with("UINT") || type.starts_with("FLOAT");
}

// A flag of text stays text, also where it looks like a number ("007"); lists of numbers stay text too.
nlohmann::ordered_json typed(const CLI::Option& option, const std::string& text) {
  if (!is_number(option)) return text;
  int64_t integer = 0;
  const char* end = text.data() + text.size();
  if (const auto [last, error] = std::from_chars(text.data(), end, integer);
      error == std::errc() && last == end) {
    return integer;
  }
  if (!option.get_type_name().starts_with("FLOAT")) return text;  // beyond 63 bits
  char* last = nullptr;
  const double real = std::strtod(text.c_str(), &last);
  const bool whole = !text.empty() && last == text.c_str() + text.size() && std::isfinite(real);
  return whole ? nlohmann::ordered_json(real) : nlohmann::ordered_json(text);
}

nlohmann::ordered_json value_of(const CLI::Option& option) {
  const std::vector<std::string> results = option.reduced_results();
  if (takes_several_values(option) && results.size() > 1) return results;
  return typed(option, fmt::format("{}", fmt::join(results, ",")));
}

}  // namespace

nlohmann::ordered_json resolved_flags(const CLI::App& command) {
  nlohmann::ordered_json flags = nlohmann::ordered_json::object();
  for (const CLI::Option* option : command.get_options()) {
    if (option->get_lnames().empty()) continue;
    const std::string& name = option->get_lnames().front();
    if (name == "help" || name == "config") continue;
    const bool is_flag = option->get_expected_max() == 0 || option->get_items_expected_max() == 0;
    if (option->count() > 0) {
      flags[name] = is_flag ? nlohmann::ordered_json(option->as<bool>()) : value_of(*option);
    } else if (is_flag) {
      flags[name] = false;
    } else if (!option->get_default_str().empty()) {
      flags[name] = typed(*option, option->get_default_str());
    }
  }
  return flags;
}

std::string to_toml(const nlohmann::ordered_json& flags) {
  std::string text;
  for (const auto& [key, value] : flags.items()) {
    for (const auto& each : value.is_array() ? value : nlohmann::ordered_json::array({value})) {
      const auto* content = each.get_ptr<const std::string*>();
      ESPALIER_CHECK(content == nullptr || is_utf8(*content),
                     "--{}: expected text in UTF-8, which a TOML file can keep, received {}", key, *content);
    }
    text += fmt::format("{} = {}\n", key, value.dump());
  }
  return text;
}

}  // namespace espalier::cli
