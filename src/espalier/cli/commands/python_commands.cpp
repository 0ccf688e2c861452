// SPDX-License-Identifier: Apache-2.0
// espalier prepare, import, export and launch: run the Python package, which has the tokenizers with their
// templates, the libraries that read other trainers' files, and the patches for other trainers. Also espalier
// train on several processes, which are those of torchrun.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "espalier/base/check.h"
#include "espalier/cli/commands/commands.h"
#include "espalier/cli/signals.h"

namespace espalier::cli {
namespace {

// The folder of the Python package. Its path relative to the program is fixed.
std::string python_folder(std::string_view command) {
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe");
  const std::filesystem::path folder = (program.parent_path() / ESPALIER_PYTHON_FOLDER).lexically_normal();
  ESPALIER_CHECK(std::filesystem::exists(folder / "espalier/prepare.py"),
                 "{}: expected Espalier's Python package in {}, found none", command, folder.string());
  return folder.string();
}

// ESPALIER_PYTHON, the interpreter of the build if it still exists, or python3 from PATH.
std::string python_interpreter() {
  const char* chosen = std::getenv("ESPALIER_PYTHON");
  if (chosen != nullptr && *chosen != '\0') return chosen;
  return access(ESPALIER_DEFAULT_PYTHON, X_OK) == 0 ? ESPALIER_DEFAULT_PYTHON : "python3";
}

/// A command written in Python.
struct PythonCommand {
  std::string name;
  std::string summary;
  std::vector<std::string> words;  // arguments of the interpreter
  std::string package;             // which it requires
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
      fmt::format("{}: cannot start {}: {}; set ESPALIER_PYTHON to a Python that has the package {}",
                  command.name, python, std::strerror(errno), command.package));
}

Command command_of(const PythonCommand& python) {
  return {.name = python.name,
          .summary = python.summary,
          .pass_on = [python](const std::vector<std::string>& arguments) { exec_python(python, arguments); }};
}

}  // namespace

void start_processes(int64_t processes, std::vector<std::string> arguments) {
  const auto flag = std::ranges::find_if(arguments, [](const std::string& word) {
    return word == "--processes" || word.starts_with("--processes=");
  });
  if (flag != arguments.end()) arguments.erase(flag, flag + (flag->find('=') != std::string::npos ? 1 : 2));
  exec_python({.name = "train",
               .summary = kSummaryOfTrain,
               .words = {"-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                         std::to_string(processes), "-m", "espalier", "train"},
               .package = "torch"},
              arguments);
}

Command prepare_command() {
  return command_of(
      {.name = "prepare",
       .summary =
           "Convert chats (OpenAI-style messages) to trajectories with a model's tokenizer and template",
       .words = {"-m", "espalier.prepare"},
       .package = "transformers"});
}

Command import_command() {
  return command_of(
      {.name = "import",
       .summary =
           "Convert rollouts of other trainers (verifiers, prime-rl, verl, TRL, SkyRL, ...) to trajectories",
       .words = {"-m", "espalier.io", "import"},
       .package = "numpy"});
}

Command export_command() {
  return command_of({.name = "export",
                     .summary = "Convert trajectories to the formats of other trainers",
                     .words = {"-m", "espalier.io", "export"},
                     .package = "numpy"});
}

Command launch_command() {
  return command_of({.name = "launch",
                     .summary = "Run the command of another trainer, with its models on trees",
                     .words = {"-m", "espalier.launch"},
                     .package = "transformers"});
}

}  // namespace espalier::cli
