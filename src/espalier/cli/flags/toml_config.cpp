// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/flags/toml_config.h"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <system_error>

#include "espalier/base/check.h"
#include "espalier/base/utf8.h"
#include "espalier/cli/flags/suggest.h"
#include "espalier/cli/flags/toml_header.h"

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

// The value of a key as texts: one, or one per element of a list.
std::vector<std::string> texts_of(const Option& option, const std::string& key, const toml::node& node,
                                  const std::string& where) {
  const toml::array* array = node.as_array();
  if (array == nullptr) return {scalar_text(node, where, key)};
  ESPALIER_CHECK(option.is_list(), "{}: key `{}`: expected one value, received a list", where, key);
  std::vector<std::string> texts;
  for (const toml::node& part : *array) texts.push_back(scalar_text(part, where, key));
  return texts;
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

NamedTexts read_config_file(const Command& command, const std::string& file) {
  NamedTexts texts;
  for (const auto& [raw_key, node] : read_toml("--config", file)) {
    std::string key(raw_key.str());
    const std::string where = place(file, node.source());
    std::replace(key.begin(), key.end(), '_', '-');
    const Option* option = command.options.find(key);
    ESPALIER_CHECK(option != nullptr, "{}: unknown key `{}`: expected a flag of `espalier {}` (see --help){}",
                   where, key, command.name, suggested_flag(command, key));
    ESPALIER_CHECK(!node.is_table(), "{}: key `{}`: expected a value, received a table", where, key);
    for (std::string& text : texts_of(*option, key, node, where)) texts.emplace_back(key, std::move(text));
  }
  return texts;
}

nlohmann::ordered_json resolved_flags(const OptionList& options) {
  auto flags = nlohmann::ordered_json::object();
  for (const Option& option : options.all()) {
    if (nlohmann::ordered_json value = option.kept(); !value.is_null())
      flags[option.name()] = std::move(value);
  }
  return flags;
}

std::string to_toml(const nlohmann::ordered_json& flags) {
  std::string text;
  for (const auto& [key, value] : flags.items()) {
    for (const auto& element : value.is_array() ? value : nlohmann::ordered_json::array({value})) {
      const auto* content = element.get_ptr<const std::string*>();
      ESPALIER_CHECK(content == nullptr || is_utf8(*content),
                     "--{}: expected UTF-8 text, which TOML requires, received {}", key, *content);
    }
    text += fmt::format("{} = {}\n", key, value.dump());
  }
  return text;
}

}  // namespace espalier::cli
