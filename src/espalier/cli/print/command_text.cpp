// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/print/command_text.h"

#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

namespace espalier::cli {
namespace {

constexpr const char* kDescription =
    "Espalier trains language models on trees of tokens: shared prefixes are encoded once, forward and "
    "backward, with exactly the gradients of ordinary training.";
constexpr const char* kClosing =
    "A first run:\n"
    "  espalier prepare --model DIR --per-turn CHATS.jsonl -o rows.jsonl   text to trajectories\n"
    "  espalier import TRACES.jsonl -o rows.jsonl                          rollouts of other trainers\n"
    "  espalier inspect --model DIR --data rows.jsonl                      what sharing will gain\n"
    "  espalier verify  --model DIR --data rows.jsonl --limit 8            proof on your model and data\n"
    "  espalier train   --model DIR --data rows.jsonl --out RUN            train; then "
    "RUN/checkpoints/step_N\n"
    "  espalier launch -- COMMAND ...                                      or train with another trainer\n"
    "\n`espalier COMMAND --help` says more about each command.";

constexpr const char* kOtherGroup = "Other";

OptionText help_flag(const std::string& group) {
  return {.names = {"-h", "--help"}, .help = "Print this help and exit", .group = group};
}

OptionText python_flag_text(const nlohmann::json& flag) {
  OptionText text;
  text.names = flag.at("names");
  text.words = flag.at("words");
  text.value = flag.at("value");
  if (!text.words.empty()) text.value = fmt::format("{}", fmt::join(text.words, "|"));
  text.help = flag.at("help");
  text.path = flag.at("path") == "file"     ? PathKind::kFile
              : flag.at("path") == "folder" ? PathKind::kFolder
                                            : PathKind::kNone;
  text.required = flag.at("required");
  text.several = flag.at("several");
  return text;
}

}  // namespace

CommandText command_text(const Command& command) {
  CommandText text{command.name, command.summary, "", command.closing, command.group, {}};
  if (command.pass_on) {  // its flags are declared in Python
    const nlohmann::json commands = nlohmann::json::parse(kPythonFlags);
    if (!commands.contains(command.name)) return text;  // it cannot run here (without_torch.cpp)
    const nlohmann::json& help = commands.at(command.name);
    text.description = help.at("description");
    text.closing = help.at("closing");
    for (const nlohmann::json& flag : help.at("flags")) text.flags.push_back(python_flag_text(flag));
    return text;
  }
  for (const Option& option : command.options.all()) {
    if (!option.traits().hidden) text.flags.push_back(option.text());
  }
  if (command.has_config) {
    text.flags.push_back(
        {.names = {"--config"},
         .value = "FILE",
         .help = "TOML file with these flags as keys. Flags on the command line take precedence",
         .group = kOtherGroup,
         .path = PathKind::kFile});
  }
  text.flags.push_back(help_flag(kOtherGroup));
  return text;
}

std::vector<CommandText> command_texts(const std::deque<Command>& commands) {
  const std::string group = "Options";
  CommandText program{"espalier", kDescription, "", kClosing, "", {}};
  program.flags = {{.names = {"--version"},
                    .help = "Print the version and how the program was built, and exit",
                    .group = group},
                   help_flag(group)};
  std::vector<CommandText> texts{program};
  for (const Command& command : commands) texts.push_back(command_text(command));
  return texts;
}

}  // namespace espalier::cli
