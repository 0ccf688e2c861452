# SPDX-License-Identifier: Apache-2.0
"""What the help of all commands says, as data for shell completion and the manual page."""

import argparse
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ..io.arguments import export_parser
from ..launch.arguments import launch_parser
from ..server.arguments import serve_parser
from .arguments import prepare_parser
from .init import init_parser
from .logprobs import logprobs_parser
from .merge import merge_parser
from .rerun import rerun_parser
from .sample import sample_parser

PARSERS = {"prepare": prepare_parser, "import": lambda: prepare_parser("import"), "export": export_parser,
           "launch": launch_parser, "serve": serve_parser, "logprobs": logprobs_parser, "merge": merge_parser,
           "sample": sample_parser, "rerun": rerun_parser, "init": init_parser}  # fmt: skip


@dataclass
class Flag:
    """A flag, or a positional argument, which has no `names`. `value`: the placeholder of its value, empty if it takes none.
    `words`: the accepted values, if they are words. `path`: "file", "folder" or "". `several`: it takes one or more values."""

    names: list
    value: str
    words: list
    path: str
    required: bool
    several: bool
    help: str
    default_value: str = ""
    group: str = ""


@dataclass
class Command:
    """A command, or the program itself. Indented lines of `description` and `closing` are not wrapped."""

    name: str
    summary: str
    closing: str
    flags: list = field(default_factory=list)
    description: str = ""

    def argument(self):
        """The positional argument; None if there is none."""
        return next((flag for flag in self.flags if not flag.names), None)


def filled(text):
    """Each paragraph on one line. Indented lines stay unchanged."""
    return re.sub(r"(?<=\S)\n(?=\S)", " ", text.strip("\n"))


def path_of(action):
    """What completion offers as its value."""
    if action.nargs == argparse.REMAINDER:  # a command with its arguments
        return "file"
    if path := getattr(action, "path", ""):
        return path
    return "" if action.type is not Path else "folder" if action.metavar == "DIR" else "file"


def flag_of(action):
    words = list(action.choices or getattr(action, "words", ()))
    value = "" if action.nargs == 0 else "|".join(action.choices or ()) or str(action.metavar or action.dest)
    return Flag(list(action.option_strings), value, words, path_of(action), bool(action.required),
                action.nargs in ("+", argparse.REMAINDER), (action.help or "") % vars(action),
                getattr(action, "default_value", ""), getattr(action, "group", ""))


def read_commands():
    """The version, and the program followed by its commands, from what it writes to this process; flags of commands written in
    Python come from their parsers."""
    given = json.load(sys.stdin.buffer)
    commands = [Command(**{**each, "flags": [Flag(**flag) for flag in each["flags"]]}) for each in given["commands"]]
    for command in commands:
        if command.name in PARSERS:
            parser = PARSERS[command.name]()
            command.description, command.closing = filled(parser.description), filled(parser.epilog)
            command.flags = [flag_of(action) for action in parser._actions]
    return given["version"], commands
