// espalier prepare: hands over to the Python package, because templates belong to the tokenizer.
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "espalier/base/check.h"
#include "espalier/cli/commands.h"

namespace espalier::cli {
namespace {

[[noreturn]] void exec_prepare(const std::vector<std::string>& args) {
  const char* chosen = std::getenv("ESPALIER_PYTHON");
  const std::string python = chosen != nullptr && *chosen != '\0' ? chosen : ESPALIER_DEFAULT_PYTHON;
  std::string path = ESPALIER_PYTHON_FOLDER;
  if (const char* before = std::getenv("PYTHONPATH"); before != nullptr && *before != '\0') {
    path += std::string(":") + before;
  }
  setenv("PYTHONPATH", path.c_str(), 1);
  std::vector<std::string> words{python, "-m", "espalier.prepare"};
  words.insert(words.end(), args.begin(), args.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  execvp(argv[0], argv.data());
  throw InputError(fmt::format("cannot start {}: {}; set ESPALIER_PYTHON to a Python with transformers",
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
