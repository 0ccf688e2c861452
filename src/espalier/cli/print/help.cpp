// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/print/help.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <sstream>

#include "espalier/cli/print/command_text.h"

namespace espalier::cli {
namespace {

constexpr size_t kWidth = 100;         // of a line
constexpr size_t kLeftColumn = 26;     // flags and their values
constexpr size_t kLeftOfCommand = 14;  // names of commands
constexpr char kUnbreakable = '\x1f';  // a space at which no line ends

/// The words of `text` in lines of at most kWidth, all but the first indented.
std::string wrapped(const std::string& text, size_t column, size_t indent) {
  std::istringstream words(text);
  std::string lines, word;
  while (words >> word) {
    if (column > indent && column + 1 + word.size() > kWidth) {
      lines += "\n" + std::string(indent, ' ');
      column = indent;
    } else if (!lines.empty()) {
      lines += ' ';
      ++column;
    }
    lines += word;
    column += word.size();
  }
  std::replace(lines.begin(), lines.end(), kUnbreakable, ' ');
  return lines;
}

/// Text of several lines. Those that are indented are tables or commands, and stay as they are.
std::string wrapped_lines(const std::string& text) {
  std::istringstream lines(text);
  std::string result, line;
  while (std::getline(lines, line)) result += (line.starts_with(' ') ? line : wrapped(line, 0, 0)) + "\n";
  return result;
}

/// Two columns: `left`, and `right` wrapped beside it, or below where there is no room.
std::string row(const std::string& left, const std::string& right, size_t width) {
  std::string line = "  " + left;
  if (line.size() + 1 > width) {
    line += "\n" + std::string(width, ' ');
  } else {
    line.resize(width, ' ');
  }
  return line + wrapped(right, width, width) + "\n";
}

std::string value_text(const FlagText& flag) {
  return flag.value + (flag.several ? "..." : "");
}

}  // namespace

HelpFormat::HelpFormat() {
  label("Positionals", "Arguments");
}

HelpGroup::HelpGroup(CLI::App* command, const std::string& name)
    : command_(command), before_(command->option_defaults()->get_group()) {
  command_->option_defaults()->group(name);
}

HelpGroup::~HelpGroup() {
  command_->option_defaults()->group(before_);
}

std::string HelpFormat::make_description(const CLI::App* app) const {
  return wrapped_lines(app->get_description()) + "\n";
}

std::string HelpFormat::make_usage(const CLI::App* app, std::string name) const {
  std::string usage = "Usage: " + name;
  if (!app->get_subcommands({}).empty()) return usage + " COMMAND [FLAGS]\n\n";
  for (const CLI::Option* option : app->get_options()) {
    if (!option->get_required()) continue;
    const FlagText flag = flag_text(*option);
    usage += (flag.names.empty() ? " " : " " + flag.names.back() + " ") + value_text(flag);
  }
  return usage + " [FLAGS]\n\n";
}

std::string HelpFormat::make_group(std::string group, bool is_positional,
                                   std::vector<const CLI::Option*> options) const {
  std::string text = fmt::format("{}:\n", group);
  for (const CLI::Option* option : options) text += make_option(option, is_positional);
  return text;
}

std::string HelpFormat::make_option(const CLI::Option* option, bool) const {
  const FlagText flag = flag_text(*option);
  std::string left = fmt::format("{}", fmt::join(flag.names, ", "));
  if (!flag.value.empty()) left += (left.empty() ? "" : " ") + value_text(flag);
  std::string right = flag.help;
  if (flag.required) right += " [required]";
  if (!flag.default_value.empty()) {
    std::string value = flag.default_value;
    std::replace(value.begin(), value.end(), ' ', kUnbreakable);
    right += fmt::format(" [default:{}{}]", kUnbreakable, value);
  }
  return row(left, right, kLeftColumn);
}

std::string HelpFormat::make_subcommand(const CLI::App* command) const {
  return row(command->get_name(), command->get_description(), kLeftOfCommand);
}

std::string HelpFormat::make_footer(const CLI::App* app) const {
  return app->get_footer().empty() ? "" : wrapped_lines(app->get_footer());
}

}  // namespace espalier::cli
