# SPDX-License-Identifier: Apache-2.0
"""`espalier bench`."""

import argparse
import contextlib
import json
from collections.abc import Sequence

from ..printed import text_of
from .command import run_work
from .command_line import print_whole
from .native import run_native, texts_of
from .parser import OUTPUT, CommandParser
from .process import Process

EPILOG = """\
All sides run the same engine on the same trajectories, forward and backward,
interleaved. Figures are medians. Bounds are FLOPs(flat) / FLOPs(plan), over
sequence packing and over append-only merging, which drops trajectories that others
extend and packs the rest. Append-only merging is measured if there is anything to
merge. Without --data, random trees are measured; `espalier synth` writes others.
Without --model, a small random llama is used.

By default, trees are compared with sequence packing (and append-only merging) at
each of --ratios. With --tree-only, only trees are measured. With --strategies, the
whole tree in one micro-batch, partition and tree packing are compared with sequence
packing, at a token budget that is a fraction of the tree.
"""


def parser() -> CommandParser:
    """All flags."""
    made = CommandParser("bench", epilog=EPILOG)
    made.options("bench")
    made.group(OUTPUT)
    made.flag("out", "Also write the table to this file", "FILE", letter="-o", path="file")
    made.flag("json", "Print JSON")
    made.others()
    return made


def work(arguments: argparse.Namespace, process: Process) -> int:
    """Measures and prints the figures. Returns the exit status."""
    from ..native import core

    # The file is begun first, to fail now rather than after minutes.
    with core.TextFile(arguments.out) if arguments.out else contextlib.nullcontext() as file:
        status, result = run_native("bench", texts_of(arguments, without=("out", "json")), process)
        if file:
            file.write(text_of("bench", json.dumps(result | {"as_json": False})))
    print_whole(text_of("bench", json.dumps(result | {"as_json": bool(arguments.json)})))
    return status


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    return run_work("bench", lambda words: parser().parse(words), work, arguments)
