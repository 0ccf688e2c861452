# SPDX-License-Identifier: Apache-2.0
"""The figures and tables of `espalier bench`, which Python makes of what was measured."""

import json
import math

import pytest

from engines import init_model
from espalier.printed.bench import bench_text


@pytest.fixture(scope="module")
def model(espalier, tmp_path_factory):
    return init_model(espalier, tmp_path_factory.mktemp("llama"), "llama", dtype="float32")


def bench(espalier, model, tmp_path, *flags):
    """Rows of the JSON, and lines of the table."""
    done = espalier("bench", "--model", model, "--json", "--repeats", 1, "--warmup", 0, *flags, "-o", tmp_path / "table.md")
    return json.loads(done.stdout)["rows"], (tmp_path / "table.md").read_text().splitlines()


def check_figures(row):
    """Raises AssertionError where figures of a row do not agree with one another."""
    assert all(math.isfinite(row[name]) for name in ("por", "err", "loss", "grad_norm"))
    assert all(row[name] > 0 for name in ("seconds", "speedup", "relative_speed", "tflops_per_second"))
    assert row["por"] == pytest.approx(1 - row["tree_tokens"] / row["flat_tokens"], abs=1e-12)
    assert row["err"] == pytest.approx(1 - row["encoded_tokens"] / row["flat_tokens"], abs=1e-12)
    assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
    assert row["share_of_bound"] == pytest.approx(row["speedup"] / row["bound"], rel=1e-12)
    assert row["bound"] >= 1 - 1e-12 and 0 < row["working_bytes"] < row["peak_bytes"]


def test_a_row_per_data_and_strategy(espalier, model, tmp_path):
    rows, table = bench(espalier, model, tmp_path, "--strategies", "--ratios", "2,6", "--tree-tokens", 120)
    assert len({(row["data"], row["side"]) for row in rows}) == len(rows) == 8
    for side in ("whole tree", "partition", "tree packing", "sequence packing"):
        assert sum(f"| {side} |" in line for line in table) == 2, side  # of each of the data
    assert sum("ratio 6" in line for line in table) == 4
    for row in rows:
        check_figures(row)
        assert row["bound"] <= row["whole_tree_bound"] * (1 + 1e-12)
        flat, tree, encoded = row["flat_tokens"], row["tree_tokens"], row["encoded_tokens"]
        if row["side"] == "tree packing":
            assert tree <= encoded <= flat
        else:
            assert encoded == (flat if row["side"] == "sequence packing" else tree)
    with pytest.raises(AssertionError):
        check_figures(rows[0] | {"share_of_bound": rows[0]["share_of_bound"] * 1.01})


def test_a_row_per_ratio(espalier, model, tmp_path):
    rows, table = bench(espalier, model, tmp_path, "--ratios", "1,4", "--tree-tokens", 80, "--cpu-seconds")
    assert len(rows) == 2 and sum("|" in line for line in table) == 4
    assert sum("| as packing |" in line for line in table) == 2
    for row, ratio in zip(rows, (1, 4), strict=True):
        check_figures(row)
        assert row["cached_token_ratio"] == pytest.approx(ratio, abs=0.1) and not row["append_only_measured"]
        assert row["bound_over_append_only"] == row["bound"] and row["speedup_over_append_only"] == row["speedup"]
    assert rows[0]["bound"] == pytest.approx(1, rel=1e-12) and rows[1]["bound"] > 1


MEASURED = dict(data="three rounds", flat_tokens=100, tree_tokens=40, append_only_tokens=80, packing_flops=1000.0,
                append_only_flops=800.0)  # fmt: skip
COUNTS = dict(micro_batches=1, flops=4e12, loss=2.0, grad_norm=3.0, working_bytes=5, peak_bytes=8)
SIDES = [COUNTS | dict(side="tree", strategy="tree-packing", token_budget=40, seconds=[1.0, 4.0, 2.0], encoded_tokens=40,
                       plan_flops=400.0),
         COUNTS | dict(side="append-only merging", strategy="append-only", token_budget=40, seconds=[2.0, 2.0, 8.0], encoded_tokens=80,
                       plan_flops=800.0),
         COUNTS | dict(side="sequence packing", strategy="sequence-packing", token_budget=40, seconds=[3.0, 8.0, 10.0],
                       encoded_tokens=100, plan_flops=1000.0)]  # fmt: skip


def rows_of(sides, compares_strategies=False):
    text = bench_text(as_json=True, hardware="H", device="cpu", compares_strategies=compares_strategies,
                      data_sets=[MEASURED | {"sides": sides}])  # fmt: skip
    return json.loads(text)["rows"]


def test_figures_counted_by_hand():
    """Medians are those of ratios of each round, not ratios of medians."""
    (row,) = rows_of(SIDES)
    assert row == {
        "flat_tokens": 100, "tree_tokens": 40, "append_only_tokens": 80, "cached_token_ratio": 2.5, "por": 0.6, "micro_batches": 1,
        "encoded_tokens": 40, "err": 0.6, "seconds": 2.0, "tree_seconds": 2.0, "packing_seconds": 8.0, "append_only_seconds": 2.0,
        "append_only_measured": True, "speedup": 3.0, "speedup_low": 2.0, "speedup_high": 5.0, "relative_speed": 1.0,
        "speedup_over_append_only": 2.0, "bound": 2.5, "bound_over_append_only": 2.0, "share_of_bound": 1.2, "tflops_per_second": 2.0,
        "tree_tflops_per_second": 2.0, "packing_tflops_per_second": 0.5, "loss": 2.0, "grad_norm": 3.0, "working_bytes": 5,
        "peak_bytes": 8}  # fmt: skip
    tree, merging, packing = rows_of(SIDES, compares_strategies=True)
    assert tree["data"] == "three rounds" and {row["whole_tree_bound"] for row in (tree, merging, packing)} == {2.5}
    assert merging["speedup_over_append_only"] == packing["speedup"] == packing["bound"] == merging["bound_over_append_only"] == 1
    assert merging["relative_speed"] == 0.5 and merging["bound"] == 1.25
    (alone,) = rows_of(SIDES[:1])
    assert "packing_seconds" not in alone and alone["speedup"] == alone["speedup_over_append_only"] == 1
