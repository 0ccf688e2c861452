# SPDX-License-Identifier: Apache-2.0
"""`espalier device`."""

import argparse
from collections.abc import Sequence

from .command import run_work
from .native import print_json, print_result, run_native, texts_of
from .parser import OUTPUT, CommandParser
from .process import Process

DESCRIPTION = "Print the CPU and GPUs of this machine and the kernels that run on them."
EPILOG = """\
Prints which implementation multiplies matrices on the CPU and why, or why no GPU can
be used. Espalier's own kernels run on every GPU of compute capability 8.0 or later:
as machine code on the architectures they were built for, on others as PTX, which the
driver compiles.

When a GPU is first used, its kernels are checked against float64. Each family runs in
a separate process with a time limit: attention on a dozen difficult forests, the LM
head (head; distribution: with temperatures, softcap, scale and bias) and matrix
products. For attention, the first of library and ampere that passed is used,
otherwise masked. Libraries run in Python only; `python -m espalier.kernels` prints
which of them are taken there and why. Where kernels of head failed, operators of
LibTorch are used. Distribution and products have no alternative; a warning is printed
if they failed. The results are stored for the GPU, driver, LibTorch and build.
ESPALIER_ATTENTION selects an implementation regardless of the results; so does
ESPALIER_HEAD (kernels or composed).

Measured rates are FLOP/s of forward and backward, for each model size that plan and
train were calibrated for on this machine.
"""


def parser() -> CommandParser:
    """All flags."""
    made = CommandParser("device", DESCRIPTION, EPILOG)
    made.options("device")
    made.group(OUTPUT)
    made.flag("json", "Print JSON")
    made.help()
    return made


def work(arguments: argparse.Namespace, process: Process) -> int:
    """Prints the report. Returns the exit status."""
    status, result = run_native("device", texts_of(arguments, without=("json",)), process)
    if arguments.json:
        print_json(result)
    elif result is not None:
        print_result("device", result)
    return status


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    return run_work("device", lambda words: parser().parse(words), work, arguments)
