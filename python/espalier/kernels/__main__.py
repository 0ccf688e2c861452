# SPDX-License-Identifier: Apache-2.0
"""Which kernels Python takes on a GPU and why: `python -m espalier.kernels`.

The program `espalier device` has no libraries that Python has, and says what it takes itself.
"""

import torch

from ..hf import attention as model_attention
from . import attention, verdicts
from .libraries import OPERATORS, has_attention, missing_on
from .recurrences import Library


def lines_of(index: int) -> list[str]:
    """What is taken on this CUDA device, and why, in lines for people."""
    lines = [f"cuda:{index}  {torch.cuda.get_device_name(index)}", f"  attention    {_of_attention(index)}"]
    lines += [f"  {library.family(dtype):26} {_of_operator(library, dtype, index)}" for library in OPERATORS
              for dtype in library.dtypes]  # fmt: skip
    return [*lines, *([f"  {missing}"] if (missing := missing_on(index)) else [])]


def _of_attention(index: int) -> str:
    taken = model_attention.resolved("auto", torch.device("cuda", index))
    is_there = bool(attention.installed()) and attention.is_served(index)
    if model_attention.trainer():
        why, is_library = ["checked by the trainer: espalier device"], is_there
    else:
        families = ("library", "ampere")
        why = [f"{family}: {_told(verdicts.verdict_on(family, index))}" for family in families]
        is_library = has_attention(index)
    if is_there and (times := verdicts.verdict_on(verdicts.TIMES, index).rates):
        why.append(f"timed: {times[0] * 1e3:.3g} and {times[1] * 1e3:.3g} ms")
    is_library = is_library and not verdicts.is_ours_faster(index)
    first = "FlexAttention" if taken == "flex" else attention.installed() if is_library else "ampere"
    return f"{first} ({'; '.join(why)})"


def _of_operator(library: Library, dtype: torch.dtype, index: int) -> str:
    name = library.installed()
    if not name:
        return f"composed ({library.command} adds {library.package})"
    verdict = verdicts.verdict_on(library.family(dtype), index)
    if not verdict.is_right:
        return f"composed ({_told(verdict)})"
    if not verdict.rates:
        return f"{name} (passed)"
    wave, wave_token, level, level_token = (f"{1e6 * rate:.3g} us" for rate in verdict.rates)
    return (f"{name} where it is cheaper: {wave} a call and {wave_token} a token, composed {level} a level of chunks and "
            f"{level_token} a token")  # fmt: skip


def _told(verdict: verdicts.Finding) -> str:
    if verdict.fault:
        return f"FAILED: {verdict.fault}"
    return "passed" if verdict.checks else "not for this device"


def main() -> None:
    """Prints the lines of every GPU."""
    if not torch.cuda.is_available():
        print("no GPU can be used; `espalier device` says why")
    for index in range(torch.cuda.device_count()):
        print("\n".join(lines_of(index)))


if __name__ == "__main__":
    main()
