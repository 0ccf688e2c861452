# SPDX-License-Identifier: Apache-2.0
"""What the figures of a report say: whether to train on trees, and what to change first where sharing is lost."""

from typing import Any

from ..commands.console import count_of
from .figures import gain_figures, quoted

CLEAR_GAIN, SMALL_GAIN = 1.5, 1.1  # smaller gains are reported as small, and as none
SMALL_LOSS = 0.02  # of the tree tokens: what is not worth changing the data
HOW_LOSS_IS_COUNTED = (
    "Tokens lost: for each branch that diverges for this cause, the equal ids that follow the differing text, up to the next "
    "difference (numbers and ids in the same message are skipped). This is a lower bound of the tokens that are encoded again. "
    "Between groups: the lost tokens that only trajectories of other groups have. They are encoded once if the groups are in the "
    "same step.")  # fmt: skip


def with_verdict(report: dict[str, Any]) -> dict[str, Any]:
    """The library's report (src/espalier/inspect/report.h) with its verdict, as `espalier inspect --json` prints it: worth_it,
    leads_with (the gain that is named first), text and advice ("" if little is lost). `sharing` gets how lost tokens are
    counted, and the cached-token ratio if all of them were shared, a lower bound."""
    sharing, tree_tokens = report["sharing"], report["tree_tokens"]
    left = tree_tokens - sharing["lost_tokens"]
    better = report["flat_tokens"] / left if left > 0 else report["cached_token_ratio"]
    sharing = sharing | {"cached_token_ratio_without_losses": better, "how_counted": HOW_LOSS_IS_COUNTED}
    packing, merging = (report[f"predicted_speedup_over_{over}"] for over in ("sequence_packing", "append_only"))
    leads_with = gain_figures(report)[0][1]
    verdict = {"worth_it": min(packing, merging) >= SMALL_GAIN,
               "leads_with": "append_only" if leads_with == "append-only merging" else "sequence_packing",
               "text": _text(report, packing, merging), "advice": _advice(report, sharing)}  # fmt: skip
    return report | {"sharing": sharing, "verdict": verdict}


def _text(report: dict[str, Any], packing: float, merging: float) -> str:
    gains = gain_figures(report)
    figures = " and ".join(f"{gain:.2f}x over {over}" for gain, over, _ in gains)
    if packing < SMALL_GAIN:
        return f"trees do not help ({figures}): almost nothing is shared. Training on trees is not slower either."
    if merging < SMALL_GAIN:
        return (f"trees help only if your trainer encodes every trajectory ({figures}): a trainer that drops trajectories which "
                "others extend gains as much.")  # fmt: skip
    return f"trees help a little: {figures}." if gains[0][0] < CLEAR_GAIN else f"train on trees: {figures}."


def _advice(report: dict[str, Any], sharing: dict[str, Any]) -> str:
    lost, between = sharing["lost_tokens"], sharing["lost_tokens_between_groups"]
    part = lost / max(1, report["tree_tokens"])
    if part < SMALL_LOSS:
        return ""
    cause = max(sharing["causes"], key=lambda each: each["tokens"])
    values = ", ".join(quoted(value, 48) for value in cause["values"][:2])
    is_one = lost == 1
    shared = f", {between:,} of them between groups" if between else ""
    return (f"At least {count_of(lost, 'token')} ({part * 100:.0f}% of the tree tokens) {'is' if is_one else 'are'} encoded "
            f"again although {'it is' if is_one else 'they are'} equal{shared}; first cause: {cause['meaning']}"
            f"{f' ({values})' if values else ''}. To share {'it' if is_one else 'them'}, {cause['remedy']}; the cached-token "
            f"ratio would be {sharing['cached_token_ratio_without_losses']:.2f} or more instead of "
            f"{report['cached_token_ratio']:.2f}.")  # fmt: skip
