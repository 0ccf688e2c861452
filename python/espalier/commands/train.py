# SPDX-License-Identifier: Apache-2.0
"""`espalier train`."""

import argparse
import os
from collections.abc import Sequence

from .command import run_work
from .native import Ranks, become_ranks, print_result, run_native, texts_of
from .parser import CommandParser, whole
from .process import Process

EPILOG = """\
The last checkpoint is OUT/checkpoints/step_N, a Hugging Face folder; with
--lora-rank a PEFT folder, which `espalier merge` adds to the weights. On Ctrl-C
(SIGINT), SIGTERM and SIGHUP the run finishes its step, saves and exits with status
3; a second Ctrl-C ends it immediately. --resume continues from the newest complete
checkpoint. If a later step fails, the run saves the steps that are done and exits
with status 1.

Example:
  espalier train --model DIR --data rows.jsonl --out runs/a --steps 100 --batch-size 64 --memory-budget 16GiB
"""
_MOST_PROCESSES = 1024


def parser() -> CommandParser:
    """All flags."""
    made = CommandParser("train", epilog=EPILOG)
    made.options("train")
    made.group("Run")
    made.flag("processes", "Train on so many processes of this machine, one for each GPU: torchrun starts them. Each takes a "
              "part of every step", "N", whole(1, _MOST_PROCESSES), default="1")  # fmt: skip
    made.others()
    return made


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The values of flags. With --processes it does not return: this process becomes torchrun."""
    values = parser().parse(arguments)
    if (values.processes or 1) > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        become_ranks(values.processes, ["train", *arguments])
    return values


def work(arguments: argparse.Namespace, process: Process, ranks: Ranks | None = None) -> int:
    """Trains. Returns the exit status."""
    status, plan = run_native("train", texts_of(arguments, without=("processes",)), process, ranks)
    if plan is not None and (ranks is None or ranks.is_first):
        print_result("dry_run", plan)
    return status


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    return run_work("train", parse, work, arguments)
