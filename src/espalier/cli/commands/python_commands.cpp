// SPDX-License-Identifier: Apache-2.0
// espalier prepare, import and export: handed over to the Python package, because templates belong to the
// tokenizer, and what other trainers record is read by Python's libraries.
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "espalier/base/check.h"
#include "espalier/cli/commands/commands.h"
#include "espalier/cli/signals.h"

namespace espalier::cli {
namespace {

// The folder of the Python package, which has one place relative to the program wherever both are installed.
std::string python_folder(std::string_view command) {
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe");
  const std::filesystem::path folder = (program.parent_path() / ESPALIER_PYTHON_FOLDER).lexically_normal();
  ESPALIER_CHECK(std::filesystem::exists(folder / "espalier/prepare.py"),
                 "{}: expected Espalier's Python package in {}, found none", command, folder.string());
  return folder.string();
}

// The one that was asked for, that of the build where it still exists, or python3 of PATH, which is that of
// an active environment.
std::string python_interpreter() {
  const char* chosen = std::getenv("ESPALIER_PYTHON");
  if (chosen != nullptr && *chosen != '\0') return chosen;
  return access(ESPALIER_DEFAULT_PYTHON, X_OK) == 0 ? ESPALIER_DEFAULT_PYTHON : "python3";
}

/// A command that Python runs.
struct PythonCommand {
  std::string name;
  std::string summary;
  std::vector<std::string> words;  // behind the interpreter
  std::string package;             // that it needs
};

[[noreturn]] void exec_python(const PythonCommand& command, const std::vector<std::string>& args) {
  const std::string python = python_interpreter();
  std::string path = python_folder(command.name);
  if (const char* before = std::getenv("PYTHONPATH"); before != nullptr && *before != '\0') {
    path += std::string(":") + before;
  }
  setenv("PYTHONPATH", path.c_str(), 1);
  std::vector<std::string> words{python};
  words.insert(words.end(), command.words.begin(), command.words.end());
  words.insert(words.end(), args.begin(), args.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  restore_signals();
  execvp(argv[0], argv.data());
  throw InputError(
      fmt::format("{}: expected a Python with the package {}, cannot start {}: {}; set "
                  "ESPALIER_PYTHON to one",
                  command.name, command.package, python, std::strerror(errno)));
}

Command command_of(const PythonCommand& python) {
  return {.name = python.name,
          .summary = python.summary,
          .pass_on = [python](const std::vector<std::string>& arguments) { exec_python(python, arguments); }};
}

}  // namespace

Command prepare_command() {
  return command_of(
      {.name = "prepare",
       .summary =
           "Turn chats (OpenAI-style messages) into trajectories with a model's own tokenizer and template",
       .words = {"-m", "espalier.prepare"},
       .package = "transformers"});
}

Command import_command() {
  return command_of(
      {.name = "import",
       .summary =
           "Turn rollouts of other trainers (verifiers, prime-rl, verl, TRL, SkyRL, ...) into trajectories",
       .words = {"-m", "espalier.io", "import"},
       .package = "numpy"});
}

Command export_command() {
  return command_of({.name = "export",
                     .summary = "Turn trajectories into what other trainers read",
                     .words = {"-m", "espalier.io", "export"},
                     .package = "numpy"});
}

}  // namespace espalier::cli
