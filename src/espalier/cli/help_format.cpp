// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/help_format.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <sstream>

#include "espalier/base/units.h"

namespace espalier::cli {
namespace {

constexpr size_t kWidth = 100;         // of a line
constexpr size_t kLeftColumn = 26;     // flags and their values
constexpr size_t kLeftOfCommand = 12;  // names of commands
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

bool takes_value(const CLI::Option& option) {
  return option.get_items_expected_max() > 0;
}

std::string default_text(const CLI::Option& option) {
  const std::string text = option.get_default_str();
  if (value_name(option) != "SIZE" || text.empty() || text == "0") return text;
  std::string size = human_bytes(std::stod(text));
  std::replace(size.begin(), size.end(), ' ', kUnbreakable);
  return size;
}

}  // namespace

std::vector<std::string> accepted_words(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  const size_t begin = type.find(":{"), end = type.find('}');
  if (begin == std::string::npos || end == std::string::npos) return {};
  return CLI::detail::split(type.substr(begin + 2, end - begin - 2), ',');
}

std::string value_name(const CLI::Option& option) {
  if (!takes_value(option)) return "";
  if (const auto words = accepted_words(option); !words.empty())
    return fmt::format("{}", fmt::join(words, "|"));
  // A type with the descriptions of its checks, such as INT:INT >= 0.
  const std::string type = option.get_type_name();
  const size_t colon = type.find(':');
  const std::string name = type.substr(0, colon);
  const std::string checks = colon == std::string::npos ? "" : type.substr(colon + 1);
  if (name == "INT" || name == "UINT") return checks.starts_with("SIZE") ? "SIZE" : "N";
  if (name == "FLOAT") return "X";
  return checks.empty() ? name : checks;
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
    usage += fmt::format(" --{} {}", option->get_lnames().front(), value_name(*option));
    if (option->get_items_expected_max() > 1) usage += "...";
  }
  return usage + " [FLAGS]\n\n";
}

std::string HelpFormat::make_group(std::string group, bool is_positional,
                                   std::vector<const CLI::Option*> options) const {
  std::string text = fmt::format("{}:\n", group);
  for (const CLI::Option* option : options) text += make_option(option, is_positional);
  return text;
}

std::string HelpFormat::make_option(const CLI::Option* option, bool is_positional) const {
  std::string left = make_option_name(option, is_positional);
  std::replace(left.begin(), left.end(), ',', ' ');
  if (const std::string value = value_name(*option); !value.empty()) left += " " + value;
  if (option->get_items_expected_max() > 1) left += option->get_delimiter() == '\0' ? "..." : ",...";
  std::string right = option->get_description();
  if (option->get_required()) right += " [required]";
  if (const std::string value = default_text(*option); !value.empty())
    right += fmt::format(" [default:{}{}]", kUnbreakable, value);
  return row(left, right, kLeftColumn);
}

std::string HelpFormat::make_subcommand(const CLI::App* command) const {
  return row(command->get_name(), command->get_description(), kLeftOfCommand);
}

std::string HelpFormat::make_footer(const CLI::App* app) const {
  return app->get_footer().empty() ? "" : wrapped_lines(app->get_footer());
}

}  // namespace espalier::cli
