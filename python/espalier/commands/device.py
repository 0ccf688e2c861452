# SPDX-License-Identifier: Apache-2.0
"""`espalier device`."""

import argparse
import re
from collections.abc import Sequence

from ..errors import UsageError
from .command import run_work
from .command_line import print_whole
from .native import print_json, print_result, run_native, texts_of
from .parser import OUTPUT, CommandParser
from .process import Process

EPILOG = """\
Prints which implementation multiplies matrices on the CPU and why, or why no GPU can
be used. Espalier's own kernels run on every GPU of compute capability 8.0 or later:
as machine code on the architectures they were built for, on others as PTX, which the
driver compiles.

When a GPU is first used, its kernels are checked against float64. Each family runs in
a separate process with a time limit: attention on a dozen difficult forests, the LM
head (head; distribution: with temperatures, softcap, scale and bias) and matrix
products. For attention, the first of library and ampere that passed is used,
otherwise masked. `python -m espalier.kernels` prints which libraries are taken and why.
Where kernels of head failed, operators of LibTorch are used. Distribution and products
have no alternative; a warning is printed if they failed. The results are stored for
the GPU, driver, LibTorch and build. ESPALIER_ATTENTION selects an implementation
regardless of the results; so does ESPALIER_HEAD (kernels or composed).

Measured rates are FLOP/s of forward and backward, for each model size that plan and
train were calibrated for on this machine.
"""


def parser() -> CommandParser:
    """All flags."""
    made = CommandParser("device", epilog=EPILOG)
    made.group("Checks")
    made.flag("requalify", "Check the kernels again, even if results are stored")
    made.flag("check", "Check one family of kernels in this process and print its faults: for attention library, ampere or "
                       "masked (cpu with --device cpu), or head, distribution or products", "NAME")  # fmt: skip
    made.flag("device", "Device for --check: cpu, cuda or cuda:N", "cpu|cuda|cuda:N", device_name, words=("cpu", "cuda"),
              default="cuda")  # fmt: skip
    made.options("device")
    made.group(OUTPUT)
    made.flag("json", "Print JSON")
    made.help()
    return made


def device_name(text: str) -> str:
    """A reader of the device of --check."""
    if not re.fullmatch(r"cpu|cuda|cuda:(0|[1-9]\d{0,2})", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:N, received `{text}`")
    return text


def work(arguments: argparse.Namespace, process: Process) -> int:
    """Prints the report, or what the check of a family finds. Returns the exit status."""
    if arguments.check is not None:
        from ..kernels.report import checked  # which imports PyTorch

        line, status = checked(arguments.check, arguments.device or "cuda")
        print_whole(f"{line}\n")
        return status
    if arguments.device is not None:
        raise UsageError("--device: requires --check NAME")
    status, result = run_native("device", texts_of(arguments, without=("json", "requalify", "device")), process)
    if not result["cuda"]["fault"]:
        from ..kernels.report import verdicts_of

        for index, device in enumerate(result["cuda"]["devices"]):
            device.update(verdicts_of(index, bool(arguments.requalify)))
    if arguments.json:
        print_json(result)
    else:
        print_result("device", result)
    return status


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    return run_work("device", lambda words: parser().parse(words), work, arguments)
