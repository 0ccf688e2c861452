# SPDX-License-Identifier: Apache-2.0
"""Which kernels are taken on a GPU and why, those of libraries as well: `python -m espalier.kernels`."""

import argparse
import sys
from collections.abc import Sequence

import torch

from ..errors import InputError
from . import attention, report, verdicts
from .libraries import OPERATORS, has_attention, is_attention_right, missing_on, own_families
from .recurrences import Library
from .report import text_of


def lines_of(index: int) -> list[str]:
    """What is taken on this CUDA device, and why, in lines for people."""
    lines = [f"cuda:{index}  {torch.cuda.get_device_name(index)}", f"  attention    {_of_attention(index)}"]
    lines += [f"  {library.family(dtype):26} {_of_operator(library, dtype, index)}" for library in OPERATORS
              for dtype in library.dtypes]  # fmt: skip
    return [*lines, *([f"  {missing}"] if (missing := missing_on(index)) else [])]


def _of_attention(index: int) -> str:
    kernels = [family for family in own_families() if family in ("library", "ampere")]
    why = [f"{family}: {text_of(verdicts.verdict_on(family, index))}" for family in kernels]
    if attention.installed() and attention.is_served(index) and (times := verdicts.verdict_on(verdicts.TIMES, index).rates):
        why.append(f"timed: {times[0] * 1e3:.3g} and {times[1] * 1e3:.3g} ms")
    first = "FlexAttention"
    if is_attention_right(index):
        first = attention.installed() if has_attention(index) and not verdicts.is_ours_faster(index) else "ampere"
    return f"{first} ({'; '.join(why)})"


def _of_operator(library: Library, dtype: torch.dtype, index: int) -> str:
    name = library.installed()
    if not name:
        return f"composed ({library.command} adds {library.package})"
    verdict = verdicts.verdict_on(library.family(dtype), index)
    if not verdict.is_right:
        return f"composed ({text_of(verdict)})"
    if not verdict.rates:
        return f"{name} (passed)"
    wave, wave_token, level, level_token = (f"{1e6 * rate:.3g} us" for rate in verdict.rates)
    return (f"{name} where it is cheaper: {wave} a call and {wave_token} a token, composed {level} a level of chunks and "
            f"{level_token} a token")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the lines of every GPU, or checks one family. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m espalier.kernels", description=__doc__)
    parser.add_argument("--check", metavar="NAME", help="check one family of kernels in this process")
    parser.add_argument("--device", default="cuda", help="of --check: cpu, cuda or cuda:N (default: cuda)")
    parser.add_argument("--requalify", action="store_true", help="check the kernels again that `espalier device` names")
    flags = parser.parse_args(arguments)
    if flags.check:
        try:
            line, status = report.checked(flags.check, flags.device)
        except InputError as error:
            print(f"espalier: error: {error}", file=sys.stderr)
            return 1
        print(line)
        return status
    if not torch.cuda.is_available():
        print("no GPU can be used; `espalier device` says why")
    for index in range(torch.cuda.device_count()):
        if flags.requalify:
            report.verdicts_of(index, again=True)
        print("\n".join(lines_of(index)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
