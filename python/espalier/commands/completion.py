# SPDX-License-Identifier: Apache-2.0
"""`espalier completion`: shell scripts that complete commands, flags, values and files."""

import argparse
from collections.abc import Sequence

from .command import run_command
from .command_line import ArgumentParser, print_whole
from .help_data import read_commands

DESCRIPTION = "Write a shell script that completes commands, flags and files."
EPILOG = """\
To load it in bash or zsh, run `source <(espalier completion SHELL)`; in fish, run
`espalier completion fish | source`. `cmake --install` installs all three where
shells find them.
"""


def first_sentence(help):
    """A short description of a flag or command."""
    return help.split(". ")[0]


def offered_names(command):
    """Short names are left out if there is a long one."""
    return " ".join(flag.names[-1] for flag in command.flags if flag.names)


# ---- bash


def bash_values(flag):
    """Code that assigns the candidates for a value."""
    return {"file": "paths=-f", "folder": "paths=-d"}.get(flag.path) or f"words='{' '.join(flag.words)}'"


def bash_flag_cases(commands):
    """Cases for values: flags of all commands, as "COMMAND FLAG", grouped by the values that they take."""
    patterns: dict[str, list[str]] = {}
    for command in commands:
        for flag in command.flags:
            if flag.value and flag.names:
                patterns.setdefault(bash_values(flag), []).extend(f"'{command.name} {name}'" for name in flag.names)
    return "".join(f"  {' | '.join(patterns[values])}) {values} ;;\n" for values in sorted(patterns))


def bash_command_cases(program, commands):
    """Cases for all other words: commands, flags and positional arguments."""
    names = " ".join(command.name for command in commands)
    cases = f"  ' '*) words='{names} {offered_names(program)}' ;;\n"
    for command in commands:
        values = f"words='{offered_names(command)}'"
        if argument := command.argument():
            values = f"if [[ $current == -* ]]; then {values}; else {bash_values(argument)}; fi"
        cases += f"  '{command.name} '*) {values} ;;\n"
    return cases


def bash_flags_with_several_values(commands):
    """They are one pattern of `case`."""
    return " | ".join(f"'{command.name} {name}'" for command in commands for flag in command.flags if flag.several
                      for name in flag.names)  # fmt: skip


BASH = r"""# bash completion for espalier, written by `espalier completion bash`.
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
"""


def bash_script(program, commands):
    cases = bash_flag_cases([program, *commands]) + bash_command_cases(program, commands)
    return BASH.replace("@CASES@", cases).replace("@SEVERAL@", bash_flags_with_several_values(commands))


# ---- zsh


def zsh_quoted(text):
    return "'" + text.replace("'", "'\\''") + "'"


def zsh_text(text):
    """Text inside brackets or between colons of an _arguments specification."""
    for special in "\\[]:":
        text = text.replace(special, "\\" + special)
    return text


def zsh_argument(flag):
    action = {"file": "_files", "folder": "_files -/"}.get(flag.path) or (f"({' '.join(flag.words)})" if flag.words else " ")
    value = zsh_text(flag.value) + ":" + action
    if not flag.names:
        return zsh_quoted(("*:" if flag.several else "1:") + value)
    others = "*" if flag.several else f"({' '.join(flag.names)})"
    tail = f"[{zsh_text(first_sentence(flag.help))}]" + (f":{value}" if flag.value else "")
    # -oFILE, --out=FILE, and both with the value as a separate word.
    joint = lambda name: "" if not flag.value else "=" if name.startswith("--") else "+"
    return " ".join(zsh_quoted(others + name + joint(name) + tail) for name in flag.names)


def zsh_arguments(command, margin):
    return "".join(f" \\\n{margin}{zsh_argument(flag)}" for flag in command.flags)


ZSH = r"""#compdef espalier
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
"""


def zsh_script(program, commands):
    summaries = [zsh_quoted(f"{command.name}:{zsh_text(first_sentence(command.summary))}") for command in commands]
    cases = [f"    {command.name}) _arguments{zsh_arguments(command, ' ' * 6)} ;;\n" for command in commands]
    return (ZSH.replace("@PROGRAM@", zsh_arguments(program, " " * 4))
            .replace("@COMMANDS@", "".join(f"    {summary}\n" for summary in summaries))
            .replace("@CASES@", "".join(cases)))  # fmt: skip


# ---- fish


def fish_quoted(text):
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def fish_values(flag):
    if not flag.value:
        return ""
    words = f" -x -a '{' '.join(flag.words)}'" if flag.words else " -x"
    return {"file": " -r -F", "folder": " -x -a '(__fish_complete_directories)'"}.get(flag.path, words)


def fish_flag(condition, flag):
    line = f"complete -c espalier -n {fish_quoted(condition)}"
    if not flag.names:
        return line + (" -F\n" if flag.path else f" -a '{' '.join(flag.words)}'\n")
    names = "".join(f" -l {name[2:]}" if name.startswith("--") else f" -s {name[1:]}" for name in flag.names)
    return f"{line}{names}{fish_values(flag)} -d {fish_quoted(first_sentence(flag.help))}\n"


FISH = r"""# fish completion for espalier, written by `espalier completion fish`.
function __espalier_command --description 'whether the words before the cursor begin with this command, or with none'
  set -l words (commandline -opc)
  test "$words[2]" = "$argv[1]"
end
complete -c espalier -f
"""


def fish_script(program, commands):
    script = FISH
    for command in commands:
        summary = fish_quoted(first_sentence(command.summary))
        script += f"complete -c espalier -n '__espalier_command' -a {command.name} -d {summary}\n"
    script += "".join(fish_flag("__espalier_command", flag) for flag in program.flags)
    return script + "".join(fish_flag(f"__espalier_command {command.name}", flag)
                            for command in commands for flag in command.flags)  # fmt: skip


SCRIPTS = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}


def parser() -> ArgumentParser:
    """The shell."""
    made = ArgumentParser(prog="espalier completion", description=DESCRIPTION, epilog=EPILOG,
                          formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    made.add_argument("shell", choices=tuple(SCRIPTS), metavar="SHELL", help="shell that the script is for: bash, zsh or fish")
    return made


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    shell = parser().parse_args(arguments).shell
    return run_command("completion", lambda: print_whole(SCRIPTS[shell](*read_commands())))
