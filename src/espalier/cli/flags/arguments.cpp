// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/flags/arguments.h"

#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <deque>
#include <optional>

#include "espalier/cli/flags/toml_config.h"

namespace espalier::cli {
namespace {

constexpr const char* kConfig = "config";

/// The arguments as names and texts; nullopt if they ask for help.
std::optional<NamedTexts> texts_of(const Command& command, std::vector<std::string> arguments) {
  CLI::App app;
  app.set_help_flag("-h,--help");
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  std::deque<std::vector<std::string>> lists;
  std::vector<std::pair<std::string, const CLI::Option*>> parsed;
  for (const Option& option : command.options.all()) {
    const OptionText& text = option.text();
    const std::string names =
        text.names.empty() ? option.name() : fmt::format("{}", fmt::join(text.names, ","));
    CLI::Option* flag = option.kind() == OptionKind::kFlag ? app.add_flag(names)
                        : option.is_list()                 ? app.add_option(names, lists.emplace_back())
                                                           : app.add_option(names);
    if (option.is_list()) flag->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    if (option.kind() != OptionKind::kFlag) flag->type_name(text.value);
    parsed.emplace_back(option.name(), flag);
  }
  if (command.has_config) parsed.emplace_back(kConfig, app.add_option("--config")->type_name("FILE"));
  std::ranges::reverse(arguments);  // CLI11 consumes a vector from its end
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::CallForHelp&) {
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  NamedTexts texts;
  for (const auto& [name, flag] : parsed) {
    for (const std::string& text : flag->results()) texts.emplace_back(name, text);
  }
  return texts;
}

void refuse_repeated(const std::string& name, bool is_flag, const NamedTexts& texts) {
  const auto is_named = [&](const auto& argument) { return argument.first == name; };
  const auto first = std::ranges::find_if(texts, is_named);
  if (first == texts.end()) return;
  const auto second = std::find_if(first + 1, texts.end(), is_named);
  if (second == texts.end()) return;
  throw UsageError(fmt::format("--{} was given twice{}", name,
                               is_flag ? "" : fmt::format(": {} and {}", first->second, second->second)));
}

void add_texts_of_file(const Command& command, NamedTexts* texts) {
  refuse_repeated(kConfig, /*is_flag=*/false, *texts);
  const auto find_text = [&](const std::string& name) {
    return std::ranges::find(*texts, name, &NamedTexts::value_type::first);
  };
  const auto config = find_text(kConfig);
  if (!command.has_config || config == texts->end()) return;
  NamedTexts file_texts = read_config_file(command, config->second);
  texts->erase(config);
  std::erase_if(file_texts, [&](const auto& argument) { return find_text(argument.first) != texts->end(); });
  texts->insert(texts->end(), file_texts.begin(), file_texts.end());
}

}  // namespace

bool set_options(Command* command, const std::vector<std::string>& arguments) {
  std::optional<NamedTexts> texts = texts_of(*command, arguments);
  if (!texts) return false;
  if (command->has_config) add_texts_of_file(*command, &*texts);
  for (const Option& option : command->options.all()) {
    if (!option.is_list()) refuse_repeated(option.name(), option.kind() == OptionKind::kFlag, *texts);
  }
  try {
    command->options.set(*texts);
  } catch (const InputError& error) {
    throw UsageError(error.what());
  }
  for (const Option& option : command->options.all()) {
    const char* dashes = option.text().names.empty() ? "" : "--";
    if (!option.text().required || option.is_given()) continue;
    throw UsageError(fmt::format("{}{} is required", dashes, option.name()));
  }
  return true;
}

}  // namespace espalier::cli
