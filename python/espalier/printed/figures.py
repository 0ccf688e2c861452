# SPDX-License-Identifier: Apache-2.0
"""Numbers and foreign text as the program prints them (src/espalier/base/units.h, src/espalier/base/printable.h)."""

from typing import Any

from ..commands.console import count_of
from ..page.text import visible


def human_bytes(count: float) -> str:
    """"1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.{0 if unit == 'B' else 1}f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def seconds_text(seconds: float) -> str:
    """"12.3 ms", "1.23 s"."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def recomputation_text(tokens: int, encoded_tokens: int) -> str:
    """The cost of checkpointing: "runs 2,345 tokens through the forward pass twice: about 12% more time"; "": none."""
    if tokens == 0:
        return ""
    percent = 100 * tokens / encoded_tokens / 3  # a forward pass is a third of forward and backward
    return f"runs {count_of(tokens, 'token')} through the forward pass twice: about {percent:.0f}% more time"


def printable(text: str) -> str:
    """`text` as one line that is safe to print on a terminal."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def shortened(text: str, most: int = 60) -> str:
    """printable(text), limited to `most` bytes of whole characters, with "..." if it was cut."""
    encoded = text.encode()
    return printable(text) if len(encoded) <= most else printable(encoded[:most].decode(errors="ignore")) + "..."


def quoted(text: str, most: int, *, keep_end: bool = False) -> str:
    """The text quoted on one line, shortened at the front or the back."""
    line = printable(text).encode()
    if len(line) > most:
        cut = len(line) - most if keep_end else most
        while cut > 0 and line[cut] & 0xC0 == 0x80:
            cut -= 1
        line = b"..." + line[cut:] if keep_end else line[:cut] + b"..."
    return f'"{line.decode()}"'


def gain_figures(report: dict[str, Any]) -> list[tuple[float, str, str]]:
    """Both predicted gains, the leading one first: how much, over what, and what a trainer of that kind does."""
    packing, merging = (report[f"predicted_speedup_over_{over}"] for over in ("sequence_packing", "append_only"))
    # What trees add comes first: over merging where that alone saves much, else (answers to one prompt) over packing.
    merging_helps = packing >= 1.05 * merging
    figures = [(packing, "sequence packing", "a trainer that encodes every trajectory separately"),
               (merging, "append-only merging", "a trainer that first drops trajectories which others extend"
                + ("" if merging_helps else " (few or none here)"))]  # fmt: skip
    return figures[::-1] if merging_helps else figures


def gains_text(report: dict[str, Any], *, has_model: bool, model: str = "--model") -> str:
    """Both predicted gains under a title that names the unit and, without a model, what `model` would add."""
    knows_all = report["prediction_counts"] == "FLOPs" or has_model
    unit = report["prediction_counts"] + ("" if knows_all else f"; {model} gives FLOPs")
    lines = "".join(f"{gain:>10.2f}x over {over}: {meaning}\n" for gain, over, meaning in gain_figures(report))
    return f"predicted speed-up, at most (in {unit})\n{lines}"
