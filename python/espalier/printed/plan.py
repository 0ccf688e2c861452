# SPDX-License-Identifier: Apache-2.0
"""The text of `espalier plan`, made of what --json gives and of what was asked for."""

import math
from typing import Any

from ..commands.console import count_of
from .figures import gains_text, human_bytes, recomputation_text, seconds_text
from .table import rows_text

_CLEARLY_FASTER = 0.98  # the note about a faster candidate needs a time below this fraction of the chosen plan's
_MOST_ROWS = 16


def plan_text(plan: dict[str, Any], asked: dict[str, Any], table: dict[str, Any] | None = None) -> str:
    """The plan in a few lines, a table of all strategies with the chosen one marked, the distribution over ranks, and
    micro-batches."""
    has_model = "predicted_seconds" in plan
    chosen_by = "chosen by auto" if asked["strategy"] == "auto" else "given by --strategy"
    chosen = next(each for each in plan["comparison"] if each["chosen"])
    text = f"{_totals(plan, asked, chosen, chosen_by)}\n{gains_text(plan, has_model=has_model)}\n"
    text += f"strategies (* {chosen_by})\n{_comparison(plan, asked)}"
    if has_model and asked["calibrated"]:
        text += _faster(plan, asked)
    if "distribution" in plan:
        text += f"\n{_ranks(plan, asked)}"
    return text + (f"\n{rows_text(table)}" if table else "")


def _row(name: str, value: str) -> str:
    return f"{name:<20}{value}\n"


def _totals(plan: dict[str, Any], asked: dict[str, Any], chosen: dict[str, Any], chosen_by: str) -> str:
    text = _row("rows", f"{asked['rows']:,}: {count_of(asked['different'], 'different trajectory', 'different trajectories')} "
                        f"in {count_of(asked['trees'], 'tree')}")  # fmt: skip
    for name in ("flat tokens", "tree tokens", "encoded tokens"):
        text += _row(name, f"{plan[name.replace(' ', '_')]:,}")
    text += _row("strategy", f"{plan['strategy']}, {chosen_by}")
    budget = plan["token_budget"]
    text += _row("token budget", f"{count_of(budget, 'token')} in a micro-batch at most" if budget else "none")
    if asked["memory_budget"] > 0:
        text += _row("memory budget", human_bytes(asked["memory_budget"]))
    twice = recomputation_text(asked["recomputed_tokens"], plan["encoded_tokens"])
    twice = f", which {twice}" if twice else ""
    context = ", context in host memory" if asked["offload_context"] else ""
    text += _row("checkpointing", f"{plan['checkpoint_activations']}{context}{twice}")
    text += _row("micro-batches", f"{chosen['micro_batches']:,}")
    if "predicted_seconds" in plan:
        rates = "" if asked["calibrated"] else ", by built-in rates"
        text += _row("predicted time", f"{seconds_text(plan['predicted_seconds'])} for forward and backward of a step{rates}")
        text += _row("predicted memory", f"{human_bytes(plan['predicted_peak_bytes'])} at most")
    return text


def _comparison(plan: dict[str, Any], asked: dict[str, Any]) -> str:
    def number(name: str) -> Any:
        return lambda each: f"{each[name]:,}" if each["fits"] else "-"

    # Title, format and text of a candidate.
    columns: list[tuple[str, str, Any]] = [("strategy", "<16", lambda each: each["strategy"])]
    if any(each["checkpoint_activations"] != "none" for each in plan["comparison"]):
        columns.append(("checkpointing", "<13", lambda each: each["checkpoint_activations"]))
    if asked["memory_budget"] > 0:
        columns.append(("token budget", ">12", number("token_budget")))
    columns += [("micro-batches", ">13", number("micro_batches")), ("encoded tokens", ">14", number("encoded_tokens"))]
    if "predicted_seconds" in plan:
        columns.append(("time", ">10", lambda each: seconds_text(each["predicted_seconds"]) if each["fits"] else "-"))
        columns.append(("memory", ">10", lambda each: human_bytes(each["predicted_peak_bytes"]) if each["fits"] else "-"))
    columns.append(("fits", "", _fits))
    text = "  " + "  ".join(format(title, form) for title, form, _ in columns) + "\n"
    for each in plan["comparison"]:
        text += ("* " if each["chosen"] else "  ") + "  ".join(format(say(each), form) for _, form, say in columns) + "\n"
    return text


def _fits(candidate: dict[str, Any]) -> str:
    if candidate["fits"]:
        return "yes"
    if "smallest_token_budget" in candidate:
        return f"no: needs --token-budget {candidate['smallest_token_budget']}"
    # Rounded up, with four or five digits, so that the budget is hardly larger than needed.
    count, unit = candidate.get("smallest_memory_budget", 0), 0
    while count >= 10_240 and unit < 4:
        count, unit = count / 1024, unit + 1
    return f"no: needs --memory-budget {math.ceil(count)}{('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def _faster(plan: dict[str, Any], asked: dict[str, Any]) -> str:
    """Plans are compared by built-in rates and times predicted by measured ones, so the choice may look wrong."""
    offered = [each for each in plan["comparison"] if each["fits"] and asked["strategy"] in ("auto", each["strategy"])]
    fastest = min(offered, key=lambda each: each["predicted_seconds"])
    if fastest["predicted_seconds"] >= _CLEARLY_FASTER * plan["predicted_seconds"]:
        return ""
    way, checkpoints = fastest["strategy"], fastest["checkpoint_activations"]
    way += "" if checkpoints == "none" else f", activations checkpointed by {checkpoints}"
    return (f"By the rates measured on this machine, {way} is the fastest: {seconds_text(fastest['predicted_seconds'])}.\n"
            "Plans are compared by built-in rates, or those of --cost-model, so that the choice is the same on every machine.\n"
            "--save-cost-model writes the measured rates to a file for --cost-model.\n")  # fmt: skip


def _percent(part: float) -> str:
    return f"{100 * part:.1f}%"


def _ranks(plan: dict[str, Any], asked: dict[str, Any]) -> str:
    """A few lines of figures, and a row per rank if there are few."""
    found, has_model = plan["distribution"], "predicted_seconds" in plan
    ranks, seconds, whole = found["ranks"], found["seconds"], found["without_trees"]

    def slowest(distribution: dict[str, Any]) -> str:
        time = f"{seconds_text(distribution['seconds'])}, " if has_model else ""
        return f"{time}{_percent(distribution['imbalance'])} over the mean"

    idle, parts = sum(not rank["trajectories"] for rank in ranks), found["context_parallel"]
    count, name = len(ranks) * parts, "rank" if parts == 1 else "group"
    groups = f" in {count_of(len(ranks), 'group')} of {parts:,}, which compute each tree together" if parts > 1 else ""
    text = _row("ranks", f"{count:,}{groups}" + (f", {idle:,} of {'them' if parts == 1 else 'the groups'} idle" if idle else ""))
    text += _row(f"slowest {name}", slowest(found))
    above = seconds / found["least_seconds"] - 1 if found["least_seconds"] > 0 else 0
    text += _row("  over the bound", f"{_percent(above)} above the lower bound of any distribution")
    peaks = [rank["predicted_peak_bytes"] for rank in ranks if "predicted_peak_bytes" in rank]
    if peaks:
        text += _row("memory", f"{human_bytes(max(peaks))} at most, with the optimiser state divided")
    if "efficiency" in found:
        text += _row("communication", f"{seconds_text(found['communication_seconds'])} for {found['reduced_bytes'] / 1e9:.3g} GB "
                                      "of gradients and as many of weights, at most")  # fmt: skip
        text += _row("efficiency", f"{_percent(found['efficiency'])} of {count:,} times one process, which takes "
                                   f"{seconds_text(asked['seconds_alone'])}")  # fmt: skip
    repeated = found["repeated_tokens"]
    text += _row("split trees", f"{found['split_trees']:,}, which repeat {repeated:,} tokens "
                                f"({_percent(repeated / max(1, plan['tree_tokens']))})")  # fmt: skip
    times = whole["seconds"] / seconds if seconds > 0 else 1
    text += _row("without trees", f"{slowest(whole)}, {times:.2f} times the seconds (whole trajectories, by Karmarkar-Karp)")
    if len(ranks) > _MOST_ROWS:
        return text
    text += (f"\n  {name}  {'trajectories':>12}  {'tree tokens':>11}  {'time' if has_model else 'of slowest':>10}"
             + ("      memory\n" if peaks else "\n"))  # fmt: skip
    for index, rank in enumerate(ranks):
        time = rank["predicted_seconds"]
        share = seconds_text(time) if has_model else _percent(time / max(seconds, 1e-300))
        memory = f"  {human_bytes(peaks[index]):>10}" if peaks else ""
        text += f"  {index:>{len(name)}}  {len(rank['trajectories']):>12,}  {rank['tree_tokens']:>11,}  {share:>10}{memory}\n"
    return text
