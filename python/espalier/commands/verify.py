# SPDX-License-Identifier: Apache-2.0
"""`espalier verify`."""

import argparse
from collections.abc import Sequence

from .command import run_work
from .native import Ranks, print_json, print_result, run_native, texts_of
from .parser import OUTPUT, CommandParser
from .process import Process

EPILOG = """\
Runs all trajectories as one optimiser step twice: on trees by the plan, and one by
one with ordinary causal attention. In float64 the relative error of every
parameter's gradient may be at most 1e-12. In lower precision both sides are
compared with float64, and the error of the tree side may be at most twice that of
the other. When the tokens of other branches change, the log-probabilities of a
branch must stay bitwise identical. The exit status is 1 if anything fails. Memory
grows with --limit, and a few trajectories prove as much as many.
"""


def parser() -> CommandParser:
    """All flags."""
    made = CommandParser("verify", epilog=EPILOG)
    made.options("verify")
    made.group(OUTPUT)
    made.flag("json", "Print JSON")
    made.others()
    return made


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The values of flags."""
    return parser().parse(arguments)


def work(arguments: argparse.Namespace, process: Process, ranks: Ranks | None = None) -> int:
    """Verifies and prints the report. Returns the exit status."""
    status, result = run_native("verify", texts_of(arguments, without=("json",)), process, ranks)
    if ranks is None or ranks.is_first:
        if arguments.json:
            print_json(result["report"])
        else:
            print_result("verify", result)
    return status


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    return run_work("verify", parse, work, arguments)
