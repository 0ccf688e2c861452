// SPDX-License-Identifier: Apache-2.0
// Commands that run the Python package, which has the tokenizers with their templates, the libraries that
// read other trainers' files, the patches for other trainers, shell completion, the manual page, and what
// some commands print. Also commands on several processes, which are those of torchrun.
#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>

#include <nlohmann/json.hpp>

#include "espalier/base/check.h"
#include "espalier/base/environment.h"
#include "espalier/base/file.h"
#include "espalier/base/printable.h"
#include "espalier/cli/commands/commands.h"
#include "espalier/cli/print/command_text.h"
#include "espalier/cli/signals.h"

namespace espalier::cli {
namespace {

// The folder of the Python package. Its path relative to the program is fixed; a rank, whose program is
// Python, names it.
std::string python_folder(std::string_view command) {
  if (const std::string_view given = environment("ESPALIER_PACKAGE"); !given.empty())
    return std::string(given);
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

/// The interpreter and its arguments. Sets PYTHONPATH.
std::vector<std::string> words_of(const PythonCommand& command, const std::vector<std::string>& args) {
  std::string path = python_folder(command.name);
  if (const char* before = std::getenv("PYTHONPATH"); before != nullptr && *before != '\0') {
    path += std::string(":") + before;
  }
  setenv("PYTHONPATH", path.c_str(), 1);
  std::vector<std::string> words{python_interpreter()};
  words.insert(words.end(), command.words.begin(), command.words.end());
  words.insert(words.end(), args.begin(), args.end());
  return words;
}

std::vector<char*> argv_of(std::vector<std::string>* words) {
  std::vector<char*> argv;
  for (std::string& word : *words) argv.push_back(word.data());
  argv.push_back(nullptr);
  return argv;
}

[[noreturn]] void cannot_start(const PythonCommand& command, const std::string& python, int error) {
  throw InputError(
      fmt::format("{}: cannot start {}: {}; set ESPALIER_PYTHON to a Python that has the package {}",
                  command.name, python, std::strerror(error), command.package));
}

[[noreturn]] void exec_python(const PythonCommand& command, const std::vector<std::string>& args) {
  std::vector<std::string> words = words_of(command, args);
  restore_signals();
  execvp(words[0].c_str(), argv_of(&words).data());
  cannot_start(command, words[0], errno);
}

Command command_of(const PythonCommand& python) {
  return {.name = python.name,
          .summary = python.summary,
          .pass_on = [python](const std::vector<std::string>& arguments) { exec_python(python, arguments); }};
}

// A file without a name, since a pipe would have to be read meanwhile.
int file_of(std::string_view data) {
  const int file = memfd_create("data", MFD_CLOEXEC);
  for (ssize_t written; !data.empty(); data.remove_prefix(written)) {
    written = write(file, data.data(), data.size());
    ESPALIER_ASSERT(written > 0);
  }
  lseek(file, 0, SEEK_SET);
  return file;
}

// `commands` is the standard input of Python.
[[noreturn]] void exec_with_commands(const std::string& name, const std::vector<std::string>& arguments,
                                     const std::string& commands) {
  dup2(file_of(commands), STDIN_FILENO);
  exec_python({name, "", {"-m", "espalier.commands", name}, "numpy"}, arguments);
}

}  // namespace

void start_processes(int64_t processes, std::vector<std::string> arguments) {
  const auto flag = std::ranges::find_if(arguments, [](const std::string& word) {
    return word == "--processes" || word.starts_with("--processes=");
  });
  if (flag != arguments.end()) arguments.erase(flag, flag + (flag->find('=') != std::string::npos ? 1 : 2));
  exec_python({.name = "train",
               .summary = "",
               .words = {"-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                         std::to_string(processes), "-m", "espalier", "train"},
               .package = "torch"},
              arguments);
}

void inspect_converted(const std::vector<std::string>& prepare, const std::vector<std::string>& inspect) {
  std::vector<std::string> words{std::filesystem::read_symlink("/proc/self/exe").string()};
  words.insert(words.end(), inspect.begin(), inspect.end());
  words.emplace_back("--");
  words.insert(words.end(), prepare.begin(), prepare.end());
  exec_python({"inspect", "", {"-P", "-m", "espalier.commands.raw_rows"}, "transformers"}, words);
}

std::string by_python(const std::string& name, const std::string& kind, std::string_view data) {
  // Modules of the folder the user is in, and of site-packages, are not wanted.
  const PythonCommand command{name, "", {"-PS", "-m", "espalier.printed", kind}, "numpy"};
  std::vector<std::string> words = words_of(command, {});
  const int input = file_of(data);
  int from[2];
  const bool is_made = pipe2(from, O_CLOEXEC) == 0;
  ESPALIER_ASSERT(is_made);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, input, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, from[1], STDOUT_FILENO);
  pid_t child = -1;
  const int error =
      posix_spawnp(&child, words[0].c_str(), &actions, nullptr, argv_of(&words).data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) cannot_start(command, words[0], error);
  close(input);
  close(from[1]);
  std::string output = read_text(fmt::format("/proc/self/fd/{}", from[0]));
  close(from[0]);
  int status = -1;
  waitpid(child, &status, 0);
  ESPALIER_CHECK(status == 0, "{}: {} ended with the status {}; what it says stands above", command.name,
                 words[0], status);
  return output;
}

Vocabulary read_vocabulary(const std::string& command, const std::filesystem::path& tokenizer_json) {
  const nlohmann::json given = {{"tokenizer_json", printable(tokenizer_json.string())}};
  const std::string made = by_python(command, "vocabulary", given.dump());
  if (made.starts_with('!')) throw InputError(made.substr(1));
  // "=", the number of offsets, the offsets, the bytes.
  int64_t count = 0;
  std::memcpy(&count, &made.at(1), sizeof(count));
  std::vector<int64_t> offsets(count);
  const size_t begin = 1 + sizeof(count), end = begin + offsets.size() * sizeof(int64_t);
  std::memcpy(offsets.data(), &made.at(begin), end - begin);
  return {std::move(offsets), made.substr(end)};
}

Command python_command(std::string_view name) {
  static const PythonCommand kCommands[] = {
      {"prepare",
       "Convert chats (OpenAI-style messages) to trajectories with a model's tokenizer and template",
       {"-m", "espalier.prepare"},
       "transformers"},
      {"import",
       "Convert rollouts of other trainers (verifiers, prime-rl, verl, TRL, SkyRL, ...) to trajectories",
       {"-m", "espalier.io", "import"},
       "numpy"},
      {"export",
       "Convert trajectories to the formats of other trainers",
       {"-m", "espalier.io", "export"},
       "numpy"},
      {"launch",
       "Run the command of another trainer, with its models on trees",
       {"-m", "espalier.launch"},
       "transformers"},
      {"serve",
       "Serve the Tinker API on this machine, on trees: training and sampling of adapters",
       {"-m", "espalier.server"},
       "uvicorn"},
      {"logprobs",
       "Write the log-probability of every token, computed on the shared trees; with --entropies and --top-k "
       "also entropies and the most likely tokens",
       {"-P", "-m", "espalier.commands.logprobs"},
       "torch"},
      {"sample",
       "Sample completions of prompts, whose shared prefixes are encoded once, as rows with behaviour "
       "log-probabilities",
       {"-P", "-m", "espalier.commands.sample"},
       "torch"},
      {"merge",
       "Add an adapter to the weights of its model and write the result as a new model",
       {"-m", "espalier.commands.merge"},
       "torch"},
      {"init",
       "Create a model with random weights from a config.json",
       {"-P", "-m", "espalier.commands.init"},
       "torch"},
      {"device", "", {"-P", "-m", "espalier.kernels"}, "torch"},
      {"rerun",
       "Repeat a run in a new folder, or name what has changed since: data, model or program",
       {"-m", "espalier.commands.rerun"},
       "torch"}};
  return command_of(*std::ranges::find(kCommands, name, &PythonCommand::name));
}

Command completion_command(const std::deque<Command>* all) {
  enum class Shell { kBash, kZsh, kFish };
  static constexpr auto kShells =
      std::to_array<Word<Shell>>({{"bash", Shell::kBash}, {"zsh", Shell::kZsh}, {"fish", Shell::kFish}});
  const auto shell = std::make_shared<Shell>();
  Command command{
      .name = "completion",
      .summary = "Write a shell script that completes commands, flags and files",
      .closing =
          "To load it in bash or zsh, run `source <(espalier completion SHELL)`; in fish, run\n"
          "`espalier completion fish | source`. `cmake --install` installs all three where shells find them.",
      .has_config = false};
  command.options.add("SHELL", shell.get(), kShells, "Shell that the script is for",
                      {.required = true, .stands_alone = true, .shows_default = false});
  command.run = [=](const OptionList&) -> int {
    exec_with_commands("completion", {word_of(kShells, *shell)}, commands_json(*all, /*version=*/""));
  };
  return command;
}

Command man_command(const std::deque<Command>* all, const std::function<std::string()>& version) {
  return {
      .name = "man",
      .summary = "Write the manual page to standard output",
      .closing = "Example: espalier man | man -l -",
      .run = [=](const OptionList&) -> int { exec_with_commands("man", {}, commands_json(*all, version())); },
      .has_config = false};
}

}  // namespace espalier::cli
