# SPDX-License-Identifier: Apache-2.0
"""The tables of `espalier bench`, which Python makes of its JSON."""

import json

import pytest

from engines import init_model


@pytest.fixture(scope="module")
def model(espalier, tmp_path_factory):
    return init_model(espalier, tmp_path_factory.mktemp("llama"), "llama", dtype="float32")


def bench(espalier, model, tmp_path, *flags):
    """Rows of the JSON, and lines of the table."""
    done = espalier("bench", "--model", model, "--json", "--repeats", 1, "--warmup", 0, *flags, "-o", tmp_path / "table.md")
    return json.loads(done.stdout)["rows"], (tmp_path / "table.md").read_text().splitlines()


def test_a_row_per_data_and_strategy(espalier, model, tmp_path):
    rows, table = bench(espalier, model, tmp_path, "--strategies", "--ratios", "2,6", "--tree-tokens", 120)
    assert len(rows) == 8
    for side in ("whole tree", "partition", "tree packing", "sequence packing"):
        assert sum(f"| {side} |" in line for line in table) == 2, side  # of each of the data
    assert sum("ratio 6" in line for line in table) == 4


def test_a_row_per_ratio(espalier, model, tmp_path):
    rows, table = bench(espalier, model, tmp_path, "--ratios", "1,4", "--tree-tokens", 80, "--cpu-seconds")
    assert len(rows) == 2 and sum("|" in line for line in table) == 4
    assert sum("| as packing |" in line for line in table) == 2
