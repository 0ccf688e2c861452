// SPDX-License-Identifier: Apache-2.0
// espalier prepare: hands over to the Python package, because templates belong to the tokenizer.
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "espalier/base/check.h"
#include "espalier/cli/commands.h"
#include "espalier/cli/signals.h"

namespace espalier::cli {
namespace {

// The folder of the Python package, which has one place relative to the program wherever both are installed.
std::string python_folder() {
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe");
  const std::filesystem::path folder = (program.parent_path() / ESPALIER_PYTHON_FOLDER).lexically_normal();
  ESPALIER_CHECK(std::filesystem::exists(folder / "espalier/prepare.py"),
                 "prepare: expected Espalier's Python package in {}, found none", folder.string());
  return folder.string();
}

// The one that was asked for, that of the build where it still exists, or python3 of PATH, which is that of
// an active environment.
std::string python_interpreter() {
  const char* chosen = std::getenv("ESPALIER_PYTHON");
  if (chosen != nullptr && *chosen != '\0') return chosen;
  return access(ESPALIER_DEFAULT_PYTHON, X_OK) == 0 ? ESPALIER_DEFAULT_PYTHON : "python3";
}

[[noreturn]] void exec_prepare(const std::vector<std::string>& args) {
  const std::string python = python_interpreter();
  std::string path = python_folder();
  if (const char* before = std::getenv("PYTHONPATH"); before != nullptr && *before != '\0') {
    path += std::string(":") + before;
  }
  setenv("PYTHONPATH", path.c_str(), 1);
  std::vector<std::string> words{python, "-m", "espalier.prepare"};
  words.insert(words.end(), args.begin(), args.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  restore_signals();
  execvp(argv[0], argv.data());
  throw InputError(
      fmt::format("prepare: expected a Python with the package transformers, cannot start {}: {}; set "
                  "ESPALIER_PYTHON to one",
                  python, std::strerror(errno)));
}

}  // namespace

void add_prepare(CLI::App& app, int*) {
  CLI::App* command = app.add_subcommand(
      "prepare",
      "Turn chats (OpenAI-style messages) into trajectories with a model's own tokenizer and template");
  command->set_help_flag();  // the Python side answers --help
  command->prefix_command();
  command->callback([command] { exec_prepare(command->remaining()); });
}

}  // namespace espalier::cli
