# SPDX-License-Identifier: Apache-2.0
"""The text of `espalier train --dry-run`."""

from typing import Any

from ..commands.console import count_of
from ..page.text import visible
from .figures import gain_figures, human_bytes
from .table import table_text


def dry_run_text(mix: str, config: str, epoch: dict[str, Any], evaluation: dict[str, Any] | None = None) -> str:
    """The resolved files, the first step, and what an epoch takes."""
    text = f"# resolved mix\n{visible(mix)}\n" if mix else ""
    text += f"# resolved config\n{visible(config)}\n"
    text += (f"# plan: {count_of(epoch['steps'], 'step')} of "
             f"{count_of(epoch['trajectories'], 'trajectory', 'trajectories')} at most; the first step:\n")  # fmt: skip
    text += table_text(epoch["first_step"])
    rates = "" if epoch["calibrated"] else " (by built-in rates)"
    gains = " and ".join(f"{gain:.2f}x over {over}" for gain, over, _ in gain_figures(epoch))
    plan, merging, packing = (f"{flops / 1e12:.3g}" for flops in epoch["flops"])
    peak, resident = human_bytes(epoch["peak_bytes"]), human_bytes(epoch["resident_bytes"])
    text += f"""
# predicted memory: {peak}, of which {resident} for weights, gradients and optimizer
# predicted time: {epoch["seconds"]:.1f} s for forward and backward of an epoch{rates}
# predicted speed-up, at most: {gains} ({plan} TFLOP an epoch; {merging} by append-only merging, {packing} by sequence packing)
"""
    return text + (_evaluation_line(evaluation) if evaluation else "")


def _evaluation_line(evaluation: dict[str, Any]) -> str:
    when = f"every {count_of(evaluation['every'], 'step')} and at the end" if evaluation["every"] > 0 else "at the end"
    rows = count_of(evaluation["trajectories"], "trajectory", "trajectories")
    flat, encoded = count_of(evaluation["flat_tokens"], "flat token"), f"{evaluation['encoded_tokens']:,}"
    batches = count_of(evaluation["micro_batches"], "micro-batch", "micro-batches")
    return f"# evaluation {when}: {rows}, {flat} from {encoded} encoded in {batches}\n"
