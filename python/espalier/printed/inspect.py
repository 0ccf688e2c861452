# SPDX-License-Identifier: Apache-2.0
"""What `espalier inspect` prints."""

import json
from collections import Counter
from typing import Any

from ..commands.console import count_of
from .figures import gains_text, quoted, shortened
from .verdict import with_verdict

_TOTALS = (("trajectories", "trajectories", ","), ("trees", "trees", ","), ("nodes", "nodes", ","), ("leaves", "leaves", ","),
           ("flat tokens", "flat_tokens", ","), ("append-only tokens", "append_only_tokens", ","),
           ("tree tokens", "tree_tokens", ","), ("cached-token ratio", "cached_token_ratio", ".3f"), ("POR", "por", ".4f"),
           ("depth in nodes", "depth_nodes", ","), ("depth in tokens", "depth_tokens", ","),
           ("mean branching", "mean_branching", ".2f"), ("largest branching", "max_branching", ","))  # fmt: skip


def report_text(report: dict[str, Any], *, has_model: bool, as_json: bool = False, model: str = "--model") -> str:
    """The library's report as lines that are safe to print on a terminal, or what --json gives. `model`: how messages name the
    model."""
    report = with_verdict(report)
    if as_json:
        return json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    verdict = report["verdict"]
    text = "".join(f"{name:<22}{format(report[key], form):>16}\n" for name, key, form in _TOTALS)
    text += _multiplicity(report) + _depth(report) + _sharing(report["sharing"], model)
    text += f"\n{gains_text(report, has_model=has_model, model=model)}verdict: {verdict['text']}\n"
    return text + (f"{verdict['advice']}\n" if verdict["advice"] else "")


def _bar(part: float, width: int) -> str:
    return "#" * int(min(max(part, 0), 1) * width + 0.5)


def _multiplicity(report: dict[str, Any]) -> str:
    """Multiplicities by powers of two, so that the table stays short."""
    buckets: Counter[int] = Counter()
    for count, tokens in report["tokens_by_multiplicity"].items():
        buckets[1 << int(count).bit_length() - 1] += tokens
    text = f"\n{'multiplicity':>20}  {'tree tokens':>14}  share of the tree tokens\n"
    for low, tokens in sorted(buckets.items()):
        part = tokens / report["tree_tokens"]
        numbers = "1" if low == 1 else f"{low:,} to {2 * low - 1:,}"
        text += f"{numbers:>20}  {tokens:>14,}  {part * 100:5.1f}% {_bar(part, 40)}\n"
    return text


def _depth(report: dict[str, Any]) -> str:
    text = (f"\n{'positions':>20}  {'tree tokens':>14}  {'flat tokens':>14}  {'multiplicity':>12}  "
            "reused share of the flat tokens\n")  # fmt: skip
    for bucket in report["sharing_by_depth"]:
        positions, reused = f"{bucket['begin']:,} to {bucket['end'] - 1:,}", bucket["reused"]
        text += (f"{positions:>20}  {bucket['tree_tokens']:>14,}  {bucket['flat_tokens']:>14,}  "
                 f"{bucket['mean_multiplicity']:>12.2f}  {reused * 100:5.1f}% {_bar(reused, 30)}\n")  # fmt: skip
    return text


def _sharing(sharing: dict[str, Any], model: str) -> str:
    known = "" if sharing["text_known"] else f" (ids only: {model} with a tokenizer.json distinguishes more causes)"
    text = f"\ntrajectories diverge at {count_of(sharing['places'], 'place')}{known}\n"
    if not sharing["places"]:
        return text
    text += _row("places", "branches", "tokens lost", "between groups", "cause") + "".join(map(_cause, sharing["causes"]))
    if sharing["not_examined"]:
        text += _row("", f"{sharing['not_examined']:,}", "-", "-", "not examined: the limit of comparisons was reached")
    return text + (f"{sharing['how_counted']}\n" if sharing["lost_tokens"] else "")


def _row(places: str, branches: str, lost: str, between: str, cause: str) -> str:
    return f"{places:>10}  {branches:>10}  {lost:>14}  {between:>14}  {cause}\n"


def _cause(cause: dict[str, Any]) -> str:
    lost, between = (f"{cause[key]:,}" if cause["lost"] else "-" for key in ("tokens", "tokens_between_groups"))
    text = _row(f"{cause['places']:,}", f"{cause['divergences']:,}", lost, between, cause["meaning"])
    if not cause["lost"]:
        return text
    if cause["values"]:
        text += f"      such as {', '.join(quoted(value, 48) for value in cause['values'])}\n"
    return text + f"      to share: {cause['remedy']}\n" + "".join(map(_example, cause["examples"]))


def _example(example: dict[str, Any]) -> str:
    between = ", between groups" if example["between_groups"] else ""
    text = (f"      position {example['position']:,}, {example['role']}{between}: "
            f"after {quoted(example['before'], 48, keep_end=True)}, "
            f"{count_of(example['common'], 'equal token follows', 'equal tokens follow')}\n")  # fmt: skip
    for side in ("left", "right"):
        differing, token = example[side], example[f"{side}_token"]
        is_nothing = not differing and not (token and token.get("text") == "")  # ids may have no text
        text += f"        {shortened(example[f'{side}_trajectory']):<24} {'nothing' if is_nothing else quoted(differing, 60)}"
        text += f" then {quoted(example[f'{side}_after'], 40)}" + (f" (id {token['id']})\n" if token else "\n")
    return text
