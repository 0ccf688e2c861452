# SPDX-License-Identifier: Apache-2.0
"""The figures of `espalier bench`, its JSON and its Markdown tables, made of what was measured."""

import json
from collections.abc import Sequence
from statistics import median
from typing import Any

from .figures import human_bytes

Row = dict[str, Any]


def bench_text(as_json: bool, hardware: str, **found: Any) -> str:
    """The JSON, or the table of matrix products, of strategies, of the tree beside packing, or of the tree alone. found: rows of
    matrix products with the choice of `products` and the reason, or the device and the data sets, by strategies or not."""
    if "products" not in found:
        rows_of = _strategy_rows if found["compares_strategies"] else _tree_row
        found = {"device": found["device"], "rows": [row for data in found["data_sets"] for row in rows_of(data)]}
    if as_json:
        return json.dumps({"hardware": hardware, **found}, indent=2, ensure_ascii=False) + "\n"
    rows = found["rows"]
    if "products" in found:
        table = _products(rows, f"{found['products']} ({found['reason']})")
    elif rows and "side" in rows[0]:
        table = _strategies(rows)
    else:
        table = _ratios(rows) if rows and "packing_seconds" in rows[0] else _tree(rows)
    return f"{hardware}\n\n{table}"


def _strategy_rows(data: Row) -> list[Row]:
    """A row for each side of a data set."""
    shared, sides = _counts(data), [_figures(side, data) for side in data["sides"]]
    names = ("side", "strategy", "token_budget")
    return [_sorted(shared | side | {name: measured[name] for name in names} |
                    {"data": data["data"], "whole_tree_bound": sides[0]["bound"]})
            for side, measured in zip(sides, data["sides"])]  # fmt: skip


def _tree_row(data: Row) -> list[Row]:
    """One row: the tree, by itself or beside packing and append-only merging."""
    tree, packing = _figures(data["sides"][0], data), _figures(data["sides"][-1], data)
    row = _counts(data) | tree | {"tree_seconds": tree["seconds"], "tree_tflops_per_second": tree["tflops_per_second"]}
    if len(data["sides"]) > 1:
        merging = _merging(data)
        row |= {"packing_seconds": packing["seconds"], "packing_tflops_per_second": packing["tflops_per_second"],
                "append_only_measured": merging is not None,
                "append_only_seconds": packing["seconds"] if merging is None else median(merging["seconds"])}  # fmt: skip
    return [_sorted(row)]


def _counts(data: Row) -> Row:
    ratio = data["flat_tokens"] / data["tree_tokens"]
    counts = {name: data[name] for name in ("flat_tokens", "tree_tokens", "append_only_tokens")}
    return counts | {"cached_token_ratio": ratio, "por": 1 - 1 / ratio}


def _figures(side: Row, data: Row) -> Row:
    """Of a side, beside the others: seconds are medians of the rounds, and ratios of the ratios of each round. Speed-ups are over
    the last side, relative_speed over the first. Bounds are FLOPs of the whole rows, or after append-only merging, over those of
    the plan."""
    first, last, merging = data["sides"][0], data["sides"][-1], _merging(data)
    speedups, seconds = _ratios_of(last, side), median(side["seconds"])
    found = {name: side[name] for name in ("micro_batches", "encoded_tokens", "loss", "grad_norm", "working_bytes", "peak_bytes")}
    speedup, bound = median(speedups), data["packing_flops"] / side["plan_flops"]
    return found | {
        "err": 1 - side["encoded_tokens"] / data["flat_tokens"], "seconds": seconds, "speedup": speedup,
        "speedup_low": min(speedups), "speedup_high": max(speedups), "relative_speed": median(_ratios_of(first, side)),
        "bound": bound, "share_of_bound": speedup / bound,
        "speedup_over_append_only": speedup if merging is None else median(_ratios_of(merging, side)),
        "bound_over_append_only": data["append_only_flops"] / side["plan_flops"],
        "tflops_per_second": side["flops"] / seconds / 1e12}  # fmt: skip


def _merging(data: Row) -> Row | None:
    """The side of append-only merging; None where there is none."""
    return next((side for side in data["sides"] if side["strategy"] == "append-only"), None)


def _ratios_of(over: Row, side: Row) -> list[float]:
    return [before / after for before, after in zip(over["seconds"], side["seconds"], strict=True)]


def _sorted(row: Row) -> Row:
    return dict(sorted(row.items()))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], texts: tuple[int, ...] = ()) -> str:
    """Columns of numbers, but for those that `texts` names."""
    rule = "".join("---|" if index in texts else "---:|" for index in range(len(columns)))
    lines = [f"| {' | '.join(columns)} |", f"|{rule}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _ratios(rows: list[Row]) -> str:
    columns = ("flat tokens", "merged tokens", "tree tokens", "flat / tree", "tree s", "merging s", "packing s", "over merging",
               "bound", "over packing", "low .. high", "bound", "share of bound", "tree TFLOP/s", "packing TFLOP/s")  # fmt: skip
    text = _table(columns, [
        (f"{row['flat_tokens']:,}", f"{row['append_only_tokens']:,}", f"{row['tree_tokens']:,}",
         f"{row['cached_token_ratio']:.2f}", f"{row['tree_seconds']:.3f}",
         f"{row['append_only_seconds']:.3f}" if row["append_only_measured"] else "as packing", f"{row['packing_seconds']:.3f}",
         f"{row['speedup_over_append_only']:.2f}", f"{row['bound_over_append_only']:.2f}", f"{row['speedup']:.2f}",
         f"{row['speedup_low']:.2f} .. {row['speedup_high']:.2f}", f"{row['bound']:.2f}", f"{row['share_of_bound']:.3f}",
         f"{row['tree_tflops_per_second']:.3f}", f"{row['packing_tflops_per_second']:.3f}")
        for row in rows])  # fmt: skip
    text += ("\nOver merging: speed-up over append-only merging, which drops trajectories that others extend and packs the "
             "rest.\nOver packing: speed-up over sequence packing, which encodes every trajectory.\n")  # fmt: skip
    if not all(row["append_only_measured"] for row in rows):
        text += "As packing: no trajectory extends another, so there is nothing to merge.\n"
    return text


def _strategies(rows: list[Row]) -> str:
    columns = ("data", "POR", "flat tokens", "tree tokens", "strategy", "token budget", "micro-batches", "encoded tokens", "ERR",
               "seconds", "speed-up over packing", "low .. high", "bound of the plan", "share of it", "bound of the whole tree",
               "bound over merging", "speed / whole tree", "working memory", "peak memory")  # fmt: skip
    raised = [_is_raised(row, rows) for row in rows]
    text = _table(columns, [
        (row["data"], f"{row['por']:.2f}", f"{row['flat_tokens']:,}", f"{row['tree_tokens']:,}", row["side"],
         f"{row['token_budget']:,}{'*' if mark else ''}", f"{row['micro_batches']:,}", f"{row['encoded_tokens']:,}",
         f"{row['err']:.2f}", f"{row['seconds']:.3f}", f"{row['speedup']:.2f}",
         f"{row['speedup_low']:.2f} .. {row['speedup_high']:.2f}", f"{row['bound']:.2f}", f"{row['share_of_bound']:.2f}",
         f"{row['whole_tree_bound']:.2f}", f"{row['bound_over_append_only']:.2f}", f"{row['relative_speed']:.3f}",
         human_bytes(row["working_bytes"]), human_bytes(row["peak_bytes"]))
        for row, mark in zip(rows, raised, strict=True)], texts=(0, 4))  # fmt: skip
    if any(raised):
        text += ("\n\\* The longest trajectory: neither tree packing nor sequence packing can run at the budget of "
                 "partition.\n")  # fmt: skip
    return text


def _is_raised(row: Row, rows: list[Row]) -> bool:
    """Whether the budget exceeds the requested one because a trajectory is longer. Each data set's whole tree comes first."""
    budgets = (each["token_budget"] for each in rows if each["data"] == row["data"] and each["strategy"] == "partition")
    budget = next(budgets, None)
    return row["side"] != rows[0]["side"] and budget is not None and row["token_budget"] > budget


def _tree(rows: list[Row]) -> str:
    columns = ("flat tokens", "tree tokens", "flat / tree", "micro-batches", "encoded tokens", "tree s", "bound",
               "tree TFLOP/s", "loss")  # fmt: skip
    return _table(columns, [
        (f"{row['flat_tokens']:,}", f"{row['tree_tokens']:,}", f"{row['cached_token_ratio']:.2f}", f"{row['micro_batches']:,}",
         f"{row['encoded_tokens']:,}", f"{row['tree_seconds']:.3f}", f"{row['bound']:.2f}",
         f"{row['tree_tflops_per_second']:.3f}", f"{row['loss']:.6f}")
        for row in rows])  # fmt: skip


def _products(rows: list[Row], choice: str) -> str:
    """A line per part of a map, a column per way, and the rates over all parts of all maps."""
    ways: dict[str, float] = {}  # the seconds of all parts by each
    lines: dict[tuple[str, str], list[Row]] = {}
    flops = {}
    for row in rows:
        part = (row["map"], row["part"])
        lines.setdefault(part, []).append(row)
        flops[part] = 2.0 * row["rows"] * row["in"] * row["out"]
        ways[row["way"]] = ways.get(row["way"], 0) + flops[part] / (row["gflops_per_second"] * 1e9)
    marks = {row["way"]: " *" if row["chosen"] else "" for row in rows}
    table = [(f"{name}, {part}", f"{line[0]['rows']} x {line[0]['in']} x {line[0]['out']}",
              *(f"{row['gflops_per_second']:.1f}" for row in line)) for (name, part), line in lines.items()]  # fmt: skip
    text = _table(("GFLOP/s", "rows x in x out", *(way + mark for way, mark in marks.items())), table, texts=(0,))
    rates = "".join(f" {sum(flops.values()) / seconds / 1e9:.1f} |" for seconds in ways.values())
    return f"{text}| all | |{rates}\n\n\\* This machine's choice: {choice}\n"
