# SPDX-License-Identifier: Apache-2.0
"""Prints the help of commands written in Python as JSON, for shell completion and the manual page."""

import argparse
import json
import re
from pathlib import Path

from ..io.arguments import export_parser, import_parser
from ..launch.arguments import launch_parser
from .arguments import argument_parser

PARSERS = {"prepare": argument_parser, "import": import_parser, "export": export_parser, "launch": launch_parser}


def filled(text):
    """Each paragraph on one line. Indented lines stay unchanged."""
    return re.sub(r"(?<=\S)\n(?=\S)", " ", text.strip("\n"))


def path_of(action):
    """What completion offers as its value."""
    if action.nargs == argparse.REMAINDER:  # a command with its arguments
        return "file"
    return "" if action.type is not Path else "folder" if action.metavar == "DIR" else "file"


def flag(action):
    takes_value = action.nargs != 0
    return {
        "names": list(action.option_strings),
        "value": str(action.metavar or action.dest) if takes_value else "",
        "words": list(action.choices or ()),
        "path": path_of(action),
        "required": bool(action.required),
        "several": action.nargs in ("+", argparse.REMAINDER),
        "help": (action.help or "") % vars(action),
    }


def command(parser):
    return {"description": filled(parser.description), "closing": filled(parser.epilog),
            "flags": [flag(action) for action in parser._actions]}


def main():
    print(json.dumps({name: command(make_parser()) for name, make_parser in PARSERS.items()}, indent=1))


if __name__ == "__main__":
    main()
