// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/program.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <deque>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/mapped_file_guard.h"
#include "espalier/base/output.h"
#include "espalier/base/printable.h"
#include "espalier/cli/commands/commands.h"
#include "espalier/cli/flags/arguments.h"
#include "espalier/cli/flags/suggest.h"
#include "espalier/cli/print/command_text.h"
#include "espalier/cli/signals.h"
#include "espalier/ops/kernels/cpu/instruction_set.h"

namespace espalier::cli {

/// The commit that the program was built from: 12 hexadecimal digits, followed by "-dirty" if tracked files
/// differed from it; "unknown" outside of git. Every build updates its source (cmake/WriteCommit.cmake).
extern const char* const kCommit;

namespace {

/// Version, commit, compiler, build type, LibTorch, CUDA and the instruction set in use, one per line,
/// without a final newline. Throws InputError if ESPALIER_CPU names an instruction set that this machine
/// lacks.
std::string version_text() {
  return fmt::format(
      "espalier {}\n"
      "commit: {}\n"
      "compiler: {}\n"
      "build type: {}\n"
      "LibTorch: {}\n"
      "CUDA: {}\n"
      "instruction set: {}",
      ESPALIER_VERSION, kCommit, ESPALIER_COMPILER, ESPALIER_BUILD_TYPE, ESPALIER_LIBTORCH, ESPALIER_CUDA,
      instruction_set_name(instruction_set()));
}

// --help: flags in groups, each with the placeholder of its value, its meaning and its default.

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
      lines.append(1, '\n').append(indent, ' ');
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

/// `texts`: the result of command_texts.
std::string help_of_program(std::span<const CommandText> texts) {
  const CommandText& program = texts.front();
  const auto command_row = [](const CommandText& command) {
    return row(command.name, command.summary, kLeftOfCommand);
  };
  return fmt::format("{}\nUsage: espalier COMMAND [FLAGS]\n\n{}{}{}", wrapped_lines(program.summary),
                     grouped(std::span<const OptionText>(program.flags), flag_row),
                     grouped(texts.subspan(1), command_row), wrapped_lines(program.closing));
}

int usage_error(const std::string& message) {
  write_log(printable_lines(message) + "\nRun with --help for more information.\n");
  return 2;
}

/// Runs arguments of the program itself, such as --version.
int run_program_arguments(const std::deque<Command>& commands, const std::string& word) {
  if (word == "--version") {
    print_output("{}\n", version_text());
  } else if (word == "-h" || word == "--help") {
    print_output("{}", help_of_program(command_texts(commands)));
  } else {
    return usage_error("A command is required");
  }
  return 0;
}

int run_command(Command* command, const std::vector<std::string>& arguments) {
  if (command->pass_on) command->pass_on(arguments);  // does not return
  if (!set_options(command, arguments)) {
    print_output("{}", help_of_command(command_text(*command)));
    return 0;
  }
  if (command->hand_over) command->hand_over(arguments);
  const int exit_code = command->run(command->options);
  check_mapped_files();  // results computed from a truncated file are invalid
  return exit_code;
}

int run(const std::vector<std::string>& args) {
  std::deque<Command> commands;
  add_all_commands(&commands, version_text);
  if (const std::string fault = unknown_word(commands, args); !fault.empty()) {
    log_line("espalier: error: {} (see --help)", printable(fault));
    return 2;
  }
  const std::string word = args.empty() ? "" : args[0];
  const auto command = std::ranges::find(commands, word, &Command::name);
  int exit_code = 0;
  try {
    exit_code = command == commands.end() ? run_program_arguments(commands, word)
                                          : run_command(&*command, {args.begin() + 1, args.end()});
  } catch (const UsageError& error) {
    return usage_error(error.what());
  }
  flush_output();
  return exit_code;
}

int fail(const std::string& message) {
  // Output printed before the error comes first. If flushing fails, the error is still the one to report.
  try {
    flush_output();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
  }
  log_line("espalier: error: {}", message);
  return 1;
}

}  // namespace

int run_program(int argc, char** argv, const std::function<std::string(const std::exception&)>& message_of) {
  try {
    return run(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const ClosedPipe&) {
    die_of_closed_pipe();
  } catch (const InputError& error) {
    return fail(printable(error.what()));
  } catch (const std::exception& error) {
    return fail(message_of(error));
  }
}

}  // namespace espalier::cli
