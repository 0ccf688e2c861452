# SPDX-License-Identifier: Apache-2.0
"""`espalier plan`."""

import argparse
from collections.abc import Sequence

from .command import run_work
from .native import print_json, print_result, run_native, texts_of
from .parser import CommandParser
from .process import Process

EPILOG = """\
With --model, time and memory are predicted from rates that are measured once per
machine and model, and --memory-budget can replace --token-budget. Plans are
compared by built-in rates, or by --cost-model FILE. `train` with the same flags uses
the same plan.

Example:
  espalier plan --model DIR --data rows.jsonl --memory-budget 16GiB
"""


def parser() -> CommandParser:
    """All flags."""
    made = CommandParser("plan", epilog=EPILOG)
    made.options("plan")
    made.others()
    return made


def work(arguments: argparse.Namespace, process: Process) -> int:
    """Plans and prints the plan. Returns the exit status."""
    status, result = run_native("plan", texts_of(arguments), process)
    if arguments.json:
        print_json(result, indent=1)
    else:
        print_result("plan", result)
    return status


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    return run_work("plan", lambda words: parser().parse(words), work, arguments)
