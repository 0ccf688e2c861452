# SPDX-License-Identifier: Apache-2.0
"""What the scripts of this folder share: their flags, and the files of a figure."""

import argparse
import csv
import os
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from commit import commit
from compare_transformers import REPOSITORY, Failure, cpu_name, markdown
from gpu_measure import say

from .drawing import svg


@dataclass
class Figure:
    """A table with its pictures."""

    name: str  # of the files
    rows: list  # dicts with the same keys
    charts: dict  # ending of the file's name -> Chart


def flags(script, doc):
    parser = argparse.ArgumentParser(prog=script, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="small, to see that it works: less than a minute")
    add("--rounds", type=int, default=None, help="measured rounds (default: 3, with --quick 1)")
    add("--threads", type=int, default=0, help="CPU threads (0: all cores)")
    add("--cpu-seconds", action="store_true", help="CPU seconds instead of wall seconds: for a busy machine, with --threads 1")
    add(
        "-o",
        "--out",
        type=Path,
        default=REPOSITORY / "build/papers",
        metavar="DIR",
        help="folder for the files (default: build/papers)",
    )
    return parser


def full_size_flags(parser):
    parser.add_argument("--divisor", type=int, help="lengths are the published ones over this (default: 16, with --quick 64)")
    device_flags(parser, "the published lengths, and models four times as wide: for a GPU")


def device_flags(parser, full):
    """full: help for --full."""
    add = parser.add_argument
    add("--full", action="store_true", help=full)
    add("--device", default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="(default: %(default)s)")


def parsed(parser, argv):
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.threads = args.threads or len(os.sched_getaffinity(0))
    if args.cpu_seconds and args.threads != 1:
        parser.error("--cpu-seconds: expected --threads 1")
    return args


def hardware(args):
    if getattr(args, "device", "cpu") != "cpu":
        import torch

        return torch.cuda.get_device_name(args.device)
    clock = "CPU seconds of " if args.cpu_seconds else ""
    return f"{cpu_name()}, {os.cpu_count()} cores, {clock}{args.threads} thread{'s' * (args.threads != 1)}"


def note(args):
    return f"{hardware(args)}; commit {commit()}"


def write(figure, args):
    """The CSV, which has commit and hardware in every row, and the pictures; prints the table."""
    args.out.mkdir(parents=True, exist_ok=True)
    columns = [*figure.rows[0], "commit", "hardware"]
    with open(args.out / f"{figure.name}.csv", "w", newline="") as file:
        table = csv.DictWriter(file, columns, lineterminator="\n")
        table.writeheader()
        table.writerows({name: text_of(value) for name, value in row.items()} | {"commit": commit(), "hardware": hardware(args)}
                        for row in figure.rows)  # fmt: skip
    for ending, chart in figure.charts.items():
        (args.out / f"{figure.name}{ending}.svg").write_text(svg(chart))
    print(f"{note(args)}\n")
    print(markdown({name: lambda row, name=name: text_of(row[name]) for name in figure.rows[0]}, figure.rows))


def text_of(value):
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(script, parser, draw, argv):
    """Runs `draw(args, scratch)`, a Figure, and writes its files."""
    args = parsed(parser, argv)
    try:
        with tempfile.TemporaryDirectory(prefix="espalier-papers-") as scratch:
            write(draw(args, Path(scratch)), args)
    except Failure as failure:
        say(str(failure))
        return 1
    command = ["python", f"bench/papers/{script}", *(sys.argv[1:] if argv is None else map(str, argv))]
    say(f"wrote {args.out} ({shlex.join(command)})")
    return 0
