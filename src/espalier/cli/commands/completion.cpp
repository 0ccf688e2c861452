// SPDX-License-Identifier: Apache-2.0
// espalier completion: shell scripts that complete commands, flags, values and files.
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <memory>

#include "espalier/base/output.h"
#include "espalier/cli/commands/commands.h"
#include "espalier/cli/print/command_text.h"

namespace espalier::cli {
namespace {

using Commands = std::vector<CommandText>;

enum class Shell { kBash, kZsh, kFish };
constexpr auto kShells =
    std::to_array<Word<Shell>>({{"bash", Shell::kBash}, {"zsh", Shell::kZsh}, {"fish", Shell::kFish}});

std::string replaced(std::string text, std::string_view from, std::string_view to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
  return text;
}

// A short description of a flag or command.
std::string first_sentence(const std::string& help) {
  return help.substr(0, help.find(". "));
}

// Short names are left out if there is a long one.
std::vector<std::string> offered_names(const CommandText& command) {
  std::vector<std::string> names;
  for (const OptionText& flag : command.flags) {
    if (!flag.names.empty()) names.push_back(flag.names.back());
  }
  return names;
}

// The positional argument; nullptr if the command has none.
const OptionText* argument_of(const CommandText& command) {
  const auto found = std::ranges::find_if(command.flags, [](const OptionText& f) { return f.names.empty(); });
  return found == command.flags.end() ? nullptr : &*found;
}

// ---- bash

// Bash code that assigns the candidates for a value.
std::string bash_values(const OptionText& flag) {
  if (flag.path == PathKind::kFile) return "paths=-f";
  if (flag.path == PathKind::kFolder) return "paths=-d";
  return fmt::format("words='{}'", fmt::join(flag.words, " "));
}

// Bash cases for values: flags of all commands, as "COMMAND FLAG", grouped by the values that they take.
std::string bash_flag_cases(const Commands& commands) {
  std::map<std::string, std::vector<std::string>> patterns;
  for (const CommandText& command : commands) {
    for (const OptionText& flag : command.flags) {
      if (flag.value.empty()) continue;
      for (const std::string& name : flag.names) {
        patterns[bash_values(flag)].push_back(fmt::format("'{} {}'", command.name, name));
      }
    }
  }
  std::string cases;
  for (const auto& [values, flags] : patterns) {
    cases += fmt::format("  {}) {} ;;\n", fmt::join(flags, " | "), values);
  }
  return cases;
}

// Bash cases for all other words: commands, flags and positional arguments.
std::string bash_command_cases(const Commands& commands) {
  std::vector<std::string> names;
  for (auto command = commands.begin() + 1; command != commands.end(); ++command)
    names.push_back(command->name);
  std::string cases = fmt::format("  ' '*) words='{} {}' ;;\n", fmt::join(names, " "),
                                  fmt::join(offered_names(commands.front()), " "));
  for (auto command = commands.begin() + 1; command != commands.end(); ++command) {
    std::string values = fmt::format("words='{}'", fmt::join(offered_names(*command), " "));
    if (const OptionText* argument = argument_of(*command)) {
      values = fmt::format("if [[ $current == -* ]]; then {}; else {}; fi", values, bash_values(*argument));
    }
    cases += fmt::format("  '{} '*) {} ;;\n", command->name, values);
  }
  return cases;
}

// The flags that take several values, as one pattern of `case`.
std::string bash_flags_with_several_values(const Commands& commands) {
  std::vector<std::string> patterns;
  for (const CommandText& command : commands) {
    for (const OptionText& flag : command.flags) {
      if (!flag.several) continue;
      for (const std::string& name : flag.names)
        patterns.push_back(fmt::format("'{} {}'", command.name, name));
    }
  }
  return fmt::format("{}", fmt::join(patterns, " | "));
}

constexpr const char* kBash = R"(# bash completion for espalier, written by `espalier completion bash`.
_espalier() {
  local current=${COMP_WORDS[COMP_CWORD]} command='' flag='' words='' paths=''
  local -i at=COMP_CWORD-1
  ((at > 0)) && command=${COMP_WORDS[1]}
  # --flag=value arrives as three words.
  if [[ $current == "=" ]]; then current=''; elif [[ ${COMP_WORDS[at]} == "=" ]]; then at+=-1; fi
  ((at > 1)) && flag=${COMP_WORDS[at]}
  if [[ $current != -* ]]; then
    while ((at > 1)) && [[ ${COMP_WORDS[at]} != -* ]]; do at+=-1; done
    case "$command ${COMP_WORDS[at]}" in
    @SEVERAL@) flag=${COMP_WORDS[at]} ;;
    esac
  fi
  case "$command $flag" in
@CASES@  esac
  COMPREPLY=()
  if [[ -n $paths ]]; then
    compopt -o filenames 2>/dev/null
    mapfile -t COMPREPLY < <(compgen "$paths" -- "$current")
  else
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
  fi
}
complete -F _espalier espalier
)";

std::string bash_script(const Commands& commands) {
  return replaced(replaced(kBash, "@CASES@", bash_flag_cases(commands) + bash_command_cases(commands)),
                  "@SEVERAL@", bash_flags_with_several_values(commands));
}

// ---- zsh

std::string zsh_quoted(const std::string& text) {
  return "'" + replaced(text, "'", "'\\''") + "'";
}

// Escapes text inside brackets or between colons of an _arguments specification.
std::string zsh_text(std::string text) {
  for (const char* special : {"\\", "[", "]", ":"})
    text = replaced(text, special, "\\" + std::string(special));
  return text;
}

std::string zsh_action(const OptionText& flag) {
  if (flag.path == PathKind::kFile) return "_files";
  if (flag.path == PathKind::kFolder) return "_files -/";
  return flag.words.empty() ? " " : fmt::format("({})", fmt::join(flag.words, " "));
}

std::string zsh_argument(const OptionText& flag) {
  const std::string value = zsh_text(flag.value) + ":" + zsh_action(flag);
  const std::string help = "[" + zsh_text(first_sentence(flag.help)) + "]";
  if (flag.names.empty()) return zsh_quoted((flag.several ? "*:" : "1:") + value);
  std::string specifications;
  for (const std::string& name : flag.names) {
    // -oFILE, --out=FILE, and both with the value as a separate word.
    const char* joint = flag.value.empty() ? "" : name.starts_with("--") ? "=" : "+";
    const std::string others = flag.several ? "*" : fmt::format("({})", fmt::join(flag.names, " "));
    const std::string tail = flag.value.empty() ? "" : ":" + value;
    specifications += (specifications.empty() ? "" : " ") + zsh_quoted(others + name + joint + help + tail);
  }
  return specifications;
}

std::string zsh_arguments(const CommandText& command, const std::string& margin) {
  std::string text;
  for (const OptionText& flag : command.flags) text += " \\\n" + margin + zsh_argument(flag);
  return text;
}

constexpr const char* kZsh = R"(#compdef espalier
# zsh completion for espalier, written by `espalier completion zsh`.
_espalier() {
  local curcontext=$curcontext state state_descr line
  typeset -A opt_args
  local -a commands=(
@COMMANDS@  )
  _arguments -C@PROGRAM@ \
    '1: :->command' '*:: :->arguments'
  case $state in
  command) _describe command commands ;;
  arguments)
    case $line[1] in
@CASES@    esac
    ;;
  esac
}
if [[ $funcstack[1] == _espalier ]]; then _espalier "$@"; else compdef _espalier espalier; fi
)";

std::string zsh_script(const Commands& commands) {
  std::string descriptions, cases;
  for (auto command = commands.begin() + 1; command != commands.end(); ++command) {
    descriptions +=
        "    " + zsh_quoted(command->name + ":" + zsh_text(first_sentence(command->summary))) + "\n";
    cases += fmt::format("    {}) _arguments{} ;;\n", command->name, zsh_arguments(*command, "      "));
  }
  const std::string script = replaced(kZsh, "@PROGRAM@", zsh_arguments(commands.front(), "    "));
  return replaced(replaced(script, "@COMMANDS@", descriptions), "@CASES@", cases);
}

// ---- fish

std::string fish_quoted(const std::string& text) {
  return "'" + replaced(replaced(text, "\\", "\\\\"), "'", "\\'") + "'";
}

std::string fish_values(const OptionText& flag) {
  if (flag.value.empty()) return "";
  if (flag.path == PathKind::kFile) return " -r -F";
  if (flag.path == PathKind::kFolder) return " -x -a '(__fish_complete_directories)'";
  return flag.words.empty() ? " -x" : fmt::format(" -x -a '{}'", fmt::join(flag.words, " "));
}

std::string fish_flag(const std::string& condition, const OptionText& flag) {
  std::string line = "complete -c espalier -n " + fish_quoted(condition);
  if (flag.names.empty()) {
    return line +
           (flag.path == PathKind::kNone ? fmt::format(" -a '{}'\n", fmt::join(flag.words, " ")) : " -F\n");
  }
  for (const std::string& name : flag.names) {
    line += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
  }
  return line + fish_values(flag) + " -d " + fish_quoted(first_sentence(flag.help)) + "\n";
}

constexpr const char* kFish = R"(# fish completion for espalier, written by `espalier completion fish`.
function __espalier_command --description 'whether the words before the cursor begin with this command, or with none'
  set -l words (commandline -opc)
  test "$words[2]" = "$argv[1]"
end
complete -c espalier -f
)";

std::string fish_script(const Commands& commands) {
  std::string script = kFish;
  for (auto command = commands.begin() + 1; command != commands.end(); ++command) {
    script += fmt::format("complete -c espalier -n '__espalier_command' -a {} -d {}\n", command->name,
                          fish_quoted(first_sentence(command->summary)));
  }
  for (const CommandText& command : commands) {
    const bool program = &command == &commands.front();
    const std::string condition = "__espalier_command" + (program ? "" : " " + command.name);
    for (const OptionText& flag : command.flags) script += fish_flag(condition, flag);
  }
  return script;
}

}  // namespace

Command completion_command(const std::deque<Command>* all) {
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
  command.run = [all, shell](const OptionList&) {
    const Commands commands = command_texts(*all);
    print_output("{}", *shell == Shell::kBash  ? bash_script(commands)
                       : *shell == Shell::kZsh ? zsh_script(commands)
                                               : fish_script(commands));
    return 0;
  };
  return command;
}

}  // namespace espalier::cli
