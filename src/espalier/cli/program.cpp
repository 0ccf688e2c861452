// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/program.h"

#include <algorithm>
#include <deque>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/mapped_file_guard.h"
#include "espalier/base/output.h"
#include "espalier/base/printable.h"
#include "espalier/cli/commands/commands.h"
#include "espalier/cli/flags/arguments.h"
#include "espalier/cli/flags/suggest.h"
#include "espalier/cli/print/help.h"
#include "espalier/cli/signals.h"
#include "espalier/cli/version.h"

namespace espalier::cli {
namespace {

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
