# SPDX-License-Identifier: Apache-2.0
"""Tables of the micro-batches of a step."""

from typing import Any

from ..commands.console import count_of
from .figures import human_bytes, recomputation_text, seconds_text


def rows_text(table: dict[str, Any]) -> str:
    """A header and a line per micro-batch."""
    known = [kind for kind in ("predicted", "measured") if kind in table]
    text = f"{'micro-batch':>11}  {'parent':>7}  {'tokens':>10}  {'visible pairs':>14}  {'trajectories':>12}  {'runs':>8}"
    for titles in (("time", "memory") if kind == "predicted" else ("measured", "measured") for kind in known):
        text += "".join(f"  {title:>10}" for title in titles)
    text += "\n"
    for number, row in enumerate(table["rows"]):
        parent = "-" if row["parent"] < 0 else row["parent"]
        text += (f"{number:>11}  {parent:>7}  {row['tokens']:>10,}  {row['visible_pairs']:>14,}  "
                 f"{len(row['trajectories']):>12,}  {len(row['runs']):>8,}")  # fmt: skip
        for kind in known:
            if f"{kind}_seconds" in row:
                text += f"  {seconds_text(row[f'{kind}_seconds']):>10}  {human_bytes(row[f'{kind}_peak_bytes']):>10}"
        text += "\n"
    left = table["micro_batches"] - len(table["rows"])
    return text + (f"{'...':>11}  and {left:,} more\n" if left > 0 else "")


def table_text(table: dict[str, Any]) -> str:
    """The rows, followed by totals."""
    text = rows_text(table) + f"{table['strategy']} with {count_of(table['micro_batches'], 'micro-batch', 'micro-batches')}"
    if table["token_budget"] > 0:
        text += f" of {count_of(table['token_budget'], 'token')} at most"
    if table["checkpoint_activations"] != "none":
        text += f", activations checkpointed by {table['checkpoint_activations']}"
    flat = table["flat_tokens"]
    por = 1 - table["tree_tokens"] / flat if flat else 0
    text += f": {count_of(flat, 'flat token')}, {count_of(table['tree_tokens'], 'tree token')}, "
    text += f"{table['encoded_tokens']:,} encoded (POR {por:.4f}, ERR {table['effective_reuse_ratio']:.4f})\n"
    if twice := recomputation_text(table["recomputed_tokens"], table["encoded_tokens"]):
        text += f"checkpointing {twice}\n"
    if "predicted" in table:
        predicted, *measured = map(seconds_text, table["logprob_pass"])
        if table["logprob_pass"][0] > 0:
            text += (f"log-probabilities are computed in a separate pass first: predicted {predicted}"
                     + "".join(f", measured {seconds}" for seconds in measured) + "\n")  # fmt: skip
        seconds, size = table["predicted"]
        text += f"predicted: {seconds_text(seconds)} for forward and backward, {human_bytes(size)} at most"
        if "measured" in table:
            text += f"; measured: {seconds_text(table['measured'][0])}, {human_bytes(table['measured'][1])}"
        text += "\n"
    return text
