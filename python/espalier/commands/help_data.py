# SPDX-License-Identifier: Apache-2.0
"""What the help of all commands says, as data for shell completion and the manual page."""

import argparse
import re
from dataclasses import dataclass, field
from pathlib import Path

from .registry import COMMANDS, DESCRIPTION, EPILOG, OPTIONS


@dataclass
class FlagText:
    """A flag, or a positional argument, which has no `names`. `value`: the placeholder of its value, empty if it takes none.
    `words`: the accepted values, if they are words. `path`: "file", "folder" or "". `several`: it takes one or more values."""

    names: list[str]
    value: str = ""
    words: list[str] = field(default_factory=list)
    path: str = ""
    required: bool = False
    several: bool = False
    help: str = ""
    default_value: str = ""
    group: str = ""


@dataclass
class CommandText:
    """A command, or the program itself. Indented lines of `description` and `closing` are not wrapped."""

    name: str
    summary: str
    closing: str
    flags: list[FlagText]
    description: str = ""

    def argument(self) -> FlagText | None:
        """The positional argument; None if there is none."""
        return next((flag for flag in self.flags if not flag.names), None)


def _filled(text: str | None) -> str:
    """Each paragraph on one line. Indented lines stay unchanged."""
    return re.sub(r"(?<=\S)\n(?=\S)", " ", (text or "").strip("\n"))


def _path_of(action: argparse.Action) -> str:
    """What completion offers as its value."""
    if action.nargs == argparse.REMAINDER:  # a command with its arguments
        return "file"
    if path := getattr(action, "path", ""):
        return str(path)
    return "" if action.type is not Path else "folder" if action.metavar == "DIR" else "file"


def _flag_of(action: argparse.Action) -> FlagText:
    words: list[str] = list(action.choices or getattr(action, "words", None) or ())
    value = "" if action.nargs == 0 else "|".join(action.choices or ()) or str(action.metavar or action.dest)
    return FlagText(list(action.option_strings), value, words, _path_of(action),
                    action.required or getattr(action, "needed", False), action.nargs in ("+", argparse.REMAINDER),
                    (action.help or "") % vars(action), getattr(action, "default_value", ""),
                    getattr(action, "group", ""))  # fmt: skip


def read_commands() -> tuple[CommandText, list[CommandText]]:
    """The program, and its commands."""
    program = CommandText("espalier", DESCRIPTION, EPILOG.rstrip(), [
        FlagText(names.split(", "), help=meaning, group="Options") for names, meaning in OPTIONS.items()])  # fmt: skip
    commands = []
    for command in COMMANDS.values():
        parser = command.parser()
        flags = [_flag_of(action) for action in parser._actions if action.help != argparse.SUPPRESS]
        description = _filled(parser.description)
        is_summary = description == f"{command.summary}."
        commands.append(CommandText(command.name, command.summary, _filled(parser.epilog), flags,
                                    "" if is_summary else description))  # fmt: skip
    return program, commands
