// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/print/help.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <sstream>
#include <utility>
#include <vector>

namespace espalier::cli {
namespace {

constexpr size_t kWidth = 100;         // of a line
constexpr size_t kLeftColumn = 26;     // flags and their values
constexpr size_t kLeftOfCommand = 14;  // names of commands
constexpr char kUnbreakable = '\x1f';  // a non-breaking space

/// Wraps `text` into lines of at most kWidth, all but the first indented.
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

/// Wraps text of several lines. Indented lines are tables or commands and stay unchanged.
std::string wrapped_lines(const std::string& text) {
  std::istringstream lines(text);
  std::string result, line;
  while (std::getline(lines, line)) result += (line.starts_with(' ') ? line : wrapped(line, 0, 0)) + "\n";
  return result;
}

/// Two columns: `left`, and `right` wrapped beside it, or below it if `left` is too long.
std::string row(const std::string& left, const std::string& right, size_t width) {
  std::string line = "  " + left;
  if (line.size() + 1 > width) {
    line += "\n" + std::string(width, ' ');
  } else {
    line.resize(width, ' ');
  }
  return line + wrapped(right, width, width) + "\n";
}

std::string value_text(const OptionText& flag) {
  return flag.value + (flag.several ? "..." : "");
}

std::string flag_row(const OptionText& flag) {
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

/// A heading for each group, in order of first appearance, followed by the rows of its items.
template <class Item, class MakeRow>
std::string grouped(std::span<const Item> items, const MakeRow& make_row) {
  std::vector<std::pair<std::string, std::string>> groups;
  for (const Item& item : items) {
    auto group = std::ranges::find(groups, item.group, &std::pair<std::string, std::string>::first);
    if (group == groups.end()) group = groups.insert(group, {item.group, ""});
    group->second += make_row(item);
  }
  std::string text;
  for (const auto& [name, rows] : groups) text += fmt::format("{}:\n{}\n", name, rows);
  return text;
}

}  // namespace

std::string help_of_command(const CommandText& command) {
  std::string usage = "Usage: espalier " + command.name;
  for (const OptionText& flag : command.flags) {
    if (flag.required) usage += (flag.names.empty() ? " " : " " + flag.names.back() + " ") + value_text(flag);
  }
  std::string flags = grouped(std::span<const OptionText>(command.flags), flag_row);
  if (command.closing.empty()) flags.pop_back();
  return fmt::format("{}\n{} [FLAGS]\n\n{}{}", wrapped_lines(command.summary), usage, flags,
                     wrapped_lines(command.closing));
}

std::string help_of_program(std::span<const CommandText> texts) {
  const CommandText& program = texts.front();
  const auto command_row = [](const CommandText& command) {
    return row(command.name, command.summary, kLeftOfCommand);
  };
  return fmt::format("{}\nUsage: espalier COMMAND [FLAGS]\n\n{}{}{}", wrapped_lines(program.summary),
                     grouped(std::span<const OptionText>(program.flags), flag_row),
                     grouped(texts.subspan(1), command_row), wrapped_lines(program.closing));
}

}  // namespace espalier::cli
