# SPDX-License-Identifier: Apache-2.0
"""`espalier synth`."""

import argparse
from collections.abc import Sequence

from .command import run_work
from .native import print_result, run_native, texts_of
from .parser import CommandParser
from .process import Process


def parser() -> CommandParser:
    """All flags."""
    made = CommandParser("synth")
    made.options("synth")
    made.others()
    return made


def work(arguments: argparse.Namespace, process: Process) -> int:
    """Writes the rows and prints their figures. Returns the exit status."""
    status, result = run_native("synth", texts_of(arguments), process)
    print_result("synth", result)
    return status


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    return run_work("synth", lambda words: parser().parse(words), work, arguments)
