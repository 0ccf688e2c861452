// SPDX-License-Identifier: Apache-2.0
// Commands that run the Python package, which has the tokenizers with their templates, the libraries that
// read other trainers' files, the patches for other trainers, shell completion, the manual page, and the page
// of `inspect`.
#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/cli/commands/commands.h"
#include "espalier/cli/print/command_text.h"
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

/// What an interpreter is started with, as execvp and posix_spawnp take it.
class PythonProcess {
 public:
  /// Sets PYTHONPATH, too.
  PythonProcess(const PythonCommand& command, const std::vector<std::string>& args) : command_(command) {
    std::string path = python_folder(command.name);
    if (const char* before = std::getenv("PYTHONPATH"); before != nullptr && *before != '\0') {
      path += std::string(":") + before;
    }
    setenv("PYTHONPATH", path.c_str(), 1);
    words_.push_back(python_interpreter());
    words_.insert(words_.end(), command.words.begin(), command.words.end());
    words_.insert(words_.end(), args.begin(), args.end());
    for (std::string& word : words_) argv_.push_back(word.data());
    argv_.push_back(nullptr);
  }
  PythonProcess(const PythonProcess&) = delete;
  PythonProcess& operator=(const PythonProcess&) = delete;

  char* const* argv() const { return argv_.data(); }

  [[noreturn]] void cannot_start(int error) const {
    throw InputError(
        fmt::format("{}: cannot start {}: {}; set ESPALIER_PYTHON to a Python that has the package {}",
                    command_.name, words_[0], std::strerror(error), command_.package));
  }

 private:
  PythonCommand command_;
  std::vector<std::string> words_;
  std::vector<char*> argv_;
};

[[noreturn]] void exec_python(const PythonCommand& command, const std::vector<std::string>& args) {
  const PythonProcess process(command, args);
  restore_signals();
  execvp(process.argv()[0], process.argv());
  process.cannot_start(errno);
}

struct Pipe {
  int reading = -1, writing = -1;

  Pipe() {
    int ends[2];
    const bool is_made = pipe2(ends, O_CLOEXEC) == 0;
    ESPALIER_ASSERT(is_made);
    reading = ends[0];
    writing = ends[1];
  }
  ~Pipe() {
    close_end(&reading);
    close_end(&writing);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;

  static void close_end(int* end) {
    if (*end >= 0) ::close(std::exchange(*end, -1));
  }
};

/// Writes all of `text`, unless the reader goes away.
void write_to(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(descriptor, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return;
    text.remove_prefix(static_cast<size_t>(written));
  }
}

std::string read_all(int descriptor) {
  std::string text;
  std::vector<char> part(1 << 16);
  for (ssize_t count = 1; count != 0;) {
    count = ::read(descriptor, part.data(), part.size());
    if (count < 0 && errno != EINTR) break;
    if (count > 0) text.append(part.data(), static_cast<size_t>(count));
  }
  return text;
}

/// The standard output of a Python that gets `input` as its standard input, and reads it before it writes.
std::string output_of_python(const PythonCommand& command, std::string_view input) {
  const PythonProcess process(command, {});
  Pipe to, from;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, to.reading, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, from.writing, STDOUT_FILENO);
  pid_t child = -1;
  const int error = posix_spawnp(&child, process.argv()[0], &actions, nullptr, process.argv(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) process.cannot_start(error);
  Pipe::close_end(&to.reading);
  Pipe::close_end(&from.writing);
  write_to(to.writing, input);
  Pipe::close_end(&to.writing);
  std::string output = read_all(from.reading);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  ESPALIER_CHECK(status == 0, "{}: {} ended with the status {}; what it says stands above", command.name,
                 process.argv()[0], status);
  return output;
}

Command command_of(const PythonCommand& python) {
  return {.name = python.name,
          .summary = python.summary,
          .pass_on = [python](const std::vector<std::string>& arguments) { exec_python(python, arguments); }};
}

// `commands` is the standard input of Python: a file without a name, since a pipe would have to be read
// meanwhile.
[[noreturn]] void exec_with_commands(const std::string& name, const std::vector<std::string>& arguments,
                                     const std::string& commands) {
  const int file = memfd_create("commands", 0);
  const bool is_input = file >= 0 && dup2(file, STDIN_FILENO) == STDIN_FILENO &&
                        write(file, commands.data(), commands.size()) == std::ssize(commands) &&
                        lseek(file, 0, SEEK_SET) == 0;
  ESPALIER_ASSERT(is_input);
  exec_python({name, "", {"-m", "espalier.commands", name}, "numpy"}, arguments);
}

}  // namespace

std::string page_by_python(const std::string& data) {
  return output_of_python({"inspect", "", {"-m", "espalier.page"}, "numpy"}, data);
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
