// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/print/command_text.h"

#include <nlohmann/json.hpp>

namespace espalier {

NLOHMANN_JSON_SERIALIZE_ENUM(PathKind, {{PathKind::kNone, ""},
                                        {PathKind::kFile, "file"},
                                        {PathKind::kFolder, "folder"}})
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(OptionText, names, value, words, default_value, help, group, path,
                                   required, several)

namespace cli {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CommandText, name, summary, closing, flags)

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

}  // namespace

CommandText command_text(const Command& command) {
  CommandText text{command.name, command.summary, command.closing, command.group, {}};
  if (command.pass_on) return text;
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
  CommandText program{"espalier", kDescription, kClosing, "", {}};
  program.flags = {{.names = {"--version"},
                    .help = "Print the version and how the program was built, and exit",
                    .group = group},
                   help_flag(group)};
  std::vector<CommandText> texts{program};
  for (const Command& command : commands) texts.push_back(command_text(command));
  return texts;
}

std::string commands_json(const std::deque<Command>& commands, const std::string& version) {
  return nlohmann::json{{"version", version.substr(0, version.find('\n'))},
                        {"commands", command_texts(commands)}}
      .dump();
}

}  // namespace cli
}  // namespace espalier
