# SPDX-License-Identifier: Apache-2.0
"""Which kernels Python takes on a GPU and why: `python -m espalier.kernels`.

The program `espalier device` has no libraries that Python has, and says what it takes itself.
"""

import torch

from . import kernel_verdicts, library_attention, library_recurrences
from .hf import attention
from .libraries import has_attention, missing_on

def lines_of(index: int) -> list[str]:
    """What is taken on this CUDA device, and why, in lines for people."""
    taken = attention.resolved("auto", torch.device("cuda", index))
    library, own = (kernel_verdicts.verdict_on(family, index) for family in ("library", "ampere"))
    why = [f"{name}: {_told(verdict)}" for name, verdict in (("library", library), ("ampere", own))]
    if times := kernel_verdicts.verdict_on(kernel_verdicts.TIMES, index).rates:
        why.append(f"timed: {times[0] * 1e3:.3g} and {times[1] * 1e3:.3g} ms")
    is_library = has_attention(index) and not kernel_verdicts.is_ours_faster(index)
    first = "FlexAttention" if taken == "flex" else library_attention.installed() if is_library else "ampere"
    lines = [f"cuda:{index}  {torch.cuda.get_device_name(index)}", f"  attention    {first} ({'; '.join(why)})"]
    for dtype in ("bfloat16", "float32"):
        verdict = kernel_verdicts.verdict_on(f"recurrences {dtype}", index) if library_recurrences.installed() else None
        if verdict is None or not verdict.is_right:
            reason = "flash-linear-attention is not installed" if verdict is None else _told(verdict)
            lines.append(f"  gated delta  {dtype}: composed ({reason})")
            continue
        rates = library_recurrences.Rates(*verdict.rates) if verdict.rates else library_recurrences.Rates()
        wave, wave_token, level, level_token = (f"{1e6 * rate:.3g} us" for rate in rates)
        name = library_recurrences.installed()
        lines.append(f"  gated delta  {dtype}: {name} where it is cheaper: {wave} a wave and {wave_token} a token, composed "
                     f"{level} a level of chunks and {level_token} a token")  # fmt: skip
    return [*lines, *([f"  {missing}"] if (missing := missing_on(index)) else [])]


def _told(verdict: kernel_verdicts.Finding) -> str:
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
