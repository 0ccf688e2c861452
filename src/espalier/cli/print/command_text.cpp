// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/print/command_text.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>
#include <sstream>

#include "espalier/base/units.h"

namespace espalier::cli {
namespace {

// Capital letters stand for something else, as N in cuda:N.
bool is_word(const std::string& text) {
  return !text.empty() &&
         std::ranges::none_of(text, [](unsigned char c) { return std::isupper(c) || std::isspace(c); });
}

std::vector<std::string> parts(const std::string& text, char separator) {
  std::vector<std::string> all;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) all.push_back(part);
  return all;
}

// CLI11 has the accepted values only as text: TEXT:{sft,grpo}, TEXT:token|sequence|NUMBER or INT:INT >= 0,
// where what stands before the first colon is the type.
void set_value(const std::string& type_name, FlagText* flag) {
  const size_t colon = type_name.find(':');
  const std::string type = type_name.substr(0, colon);
  flag->value = colon == std::string::npos ? type : type_name.substr(colon + 1);
  if (type == "INT" || type == "UINT") flag->value = flag->value.starts_with("SIZE") ? "SIZE" : "N";
  if (type == "FLOAT") flag->value = "X";
  if (flag->value.starts_with('{') && flag->value.ends_with('}')) {
    flag->words = parts(flag->value.substr(1, flag->value.size() - 2), ',');
    flag->value = fmt::format("{}", fmt::join(flag->words, "|"));
  } else if (flag->value.find('|') != std::string::npos) {
    flag->words = parts(flag->value, '|');
    std::erase_if(flag->words, [](const std::string& word) { return !is_word(word); });
  }
  if (type == "FILE") flag->path = PathKind::kFile;
  if (type == "DIR") flag->path = PathKind::kFolder;
}

std::string default_text(const std::string& value, const FlagText& flag) {
  return flag.value == "SIZE" && value != "0" ? human_bytes(std::stod(value)) : value;
}

FlagText python_flag_text(const nlohmann::json& flag) {
  FlagText text;
  text.names = flag.at("names");
  text.words = flag.at("words");
  text.value = flag.at("value");
  if (!text.words.empty()) text.value = fmt::format("{}", fmt::join(text.words, "|"));
  text.help = flag.at("help");
  text.path = flag.at("path") == "file"     ? PathKind::kFile
              : flag.at("path") == "folder" ? PathKind::kFolder
                                            : PathKind::kNone;
  text.required = flag.at("required");
  text.several = flag.at("several");
  return text;
}

CommandText command_text(const CLI::App& command) {
  CommandText text{command.get_name(), command.get_description(), "", command.get_footer(), {}};
  for (const CLI::Option* option : command.get_options()) {
    if (!option->get_group().empty()) text.flags.push_back(flag_text(*option));
  }
  // What is handed over to Python has its flags there.
  if (command.get_prefix_command()) {
    const nlohmann::json help = nlohmann::json::parse(kPythonFlags).at(command.get_name());
    text.description = help.at("description");
    text.closing = help.at("closing");
    for (const nlohmann::json& flag : help.at("flags")) text.flags.push_back(python_flag_text(flag));
  }
  return text;
}

}  // namespace

FlagText flag_text(const CLI::Option& option) {
  FlagText flag;
  for (const std::string& name : option.get_snames()) flag.names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) flag.names.push_back("--" + name);
  if (option.get_items_expected_max() > 0) {
    set_value(option.get_type_name(), &flag);
    if (option.get_delimiter() != '\0') flag.value += ",...";
    if (!option.get_default_str().empty()) flag.default_value = default_text(option.get_default_str(), flag);
  }
  flag.help = option.get_description();
  flag.group = option.get_group();
  flag.required = option.get_required();
  flag.several = option.get_items_expected_max() > 1 && option.get_delimiter() == '\0';
  return flag;
}

std::vector<CommandText> command_texts(const CLI::App& app) {
  std::vector<CommandText> texts{command_text(app)};
  for (const CLI::App* command : app.get_subcommands({})) texts.push_back(command_text(*command));
  return texts;
}

}  // namespace espalier::cli
