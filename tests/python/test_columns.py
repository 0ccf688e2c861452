# SPDX-License-Identifier: Apache-2.0
"""espalier.trajectories of columns: NumPy arrays that are used as they are."""

import gc
import itertools
import json
import weakref

import numpy as np
import pytest

import espalier as package
from conftest import seed_of


def columns_of(count=40):
    """Columns as a packed file has them, with the rows that they are."""
    draw = np.random.default_rng(seed_of(61))
    sizes = draw.integers(1, 9, count)
    tokens = int(sizes.sum())
    offsets = np.cumsum([0, *sizes])
    logprobs = -draw.random(tokens).astype(np.float32)
    logprobs[offsets[:-1]] = 0
    columns = {
        "offsets": offsets,
        "input_ids": draw.integers(0, 50, tokens).astype(np.int32),
        "loss_mask": draw.random(tokens) < 0.5,
        "logprobs": logprobs,
        "ref_logprobs": logprobs.astype(np.float64),
        "advantages": draw.normal(size=tokens),
        "reward": draw.random(count),
        "chosen": (draw.random(count) < 0.5).astype(np.uint8),
        "group_id": [f"g{row % 3}" for row in range(count)],
        "routed_experts": draw.integers(0, 4, (tokens, 2)).astype(np.int32),
        "ref_topk_ids": draw.integers(0, 4, (tokens, 2)).astype(np.int32) + np.array([0, 4], np.int32),
        "ref_topk_logprobs": -draw.random((tokens, 2)),
    }
    for name, none in (("ref_topk_ids", -1), ("ref_topk_logprobs", 0)):
        columns[name][offsets[:-1]] = none
    rows = []
    for row, (begin, end) in enumerate(itertools.pairwise(offsets)):
        rows.append({name: values[begin:end] for name, values in columns.items() if name != "offsets" and len(values) == tokens})
        rows[-1].update({name: columns[name][row] for name in ("reward", "group_id")}, chosen=bool(columns["chosen"][row]))
    return columns, rows


@pytest.mark.parametrize("writeable", [True, False])
def test_they_are_the_rows_without_a_copy(tmp_path, writeable):
    columns, rows = columns_of()
    for name, values in columns.items():
        if name != "group_id":
            values.flags.writeable = writeable
    found = package.trajectories(columns)
    package.write(tmp_path / "columns.jsonl", found)
    package.write(tmp_path / "rows.jsonl", rows)
    assert (tmp_path / "columns.jsonl").read_text() == (tmp_path / "rows.jsonl").read_text()
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 40
    for name in ("input_ids", "logprobs", "ref_logprobs", "advantages", "reward", "chosen", "routed_experts", "ref_topk_ids",
                 "ref_topk_logprobs"):  # fmt: skip
        assert np.shares_memory(getattr(found, name), columns[name]), name
    assert np.shares_memory(found.loss_weights, columns["loss_mask"]) and found.loss_weights.dtype == np.uint8


def test_arrays_live_as_long_as_the_rows():
    tokens = np.arange(6, dtype=np.int32)
    gone = weakref.ref(tokens)
    found = package.trajectories({"offsets": [0, 2, 6], "input_ids": tokens})
    del tokens
    gc.collect()
    view = found.input_ids
    assert gone() is not None and view.tolist() == [0, 1, 2, 3, 4, 5] and found.loss_weights.tolist() == [1] * 6
    del found
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


def test_other_types_are_converted():
    found = package.trajectories({"offsets": [0, 1, 3], "input_ids": np.array([7, 8, 9], np.int64), "reward": [1, 2],
                                  "loss_weights": [0, 1, 0.5], "chosen": [True, False], "trajectory_id": [5, "six"]})  # fmt: skip
    assert found.input_ids.tolist() == [7, 8, 9] and found.loss_weights.tolist() == [0, 1, 0.5]
    assert found.reward.tolist() == [1, 2] and found.chosen.tolist() == [1, 0] and found.trajectory_id == ["5", "six"]


@pytest.mark.parametrize("change, fault", [
    ({"input_ids": None}, "input_ids: expected this column"),
    ({"offsets": [0, 2]}, "offsets: expected entries from 0 to 3, the length of input_ids, received 0 to 2"),
    ({"offsets": [0, 3, 2, 3]}, "offsets: expected ascending values, received 2 after 3"),
    ({"offsets": [0, 0, 3]}, "row 0: field `input_ids`"),
    ({"offsets": np.zeros((2, 2))}, "offsets: expected integers, received float64 of shape"),
    ({"offsets": []}, "offsets"),
    ({"input_ids": [1, -2, 3]}, "row 1: field `input_ids`.*-2"),
    ({"loss_mask": [1, 0]}, "loss_weights: expected 3 entries, received 2"),
    ({"loss_mask": [1, 0, 1], "loss_weights": [1, 0, 1]}, "expected one of them, received both"),
    ({"loss_weights": [1, 0, -1.0]}, "row 1: field `loss_weights`"),
    ({"logprobs": [0.5, 0, 0]}, "row 0: field `logprobs`: expected null or 0 for the first token"),
    ({"advantages": [0, float("nan"), 0]}, "row 1: field `advantages`"),
    ({"reward": [1.0, 2.0, 3.0]}, "reward: expected 2 entries, received 3"),
    ({"chosen": [0, 7]}, "field `chosen`"),
    ({"group_id": ["a"]}, "group_id: expected 2 entries, received 1"),
    ({"routed_experts": [1, 2, 3]}, r"routed_experts: expected shape \[N, W\]"),
    ({"tokens": [1]}, "tokens: expected one of input_ids"),
])  # fmt: skip
def test_columns_that_cannot_be_used(change, fault):
    columns = {"offsets": [0, 1, 3], "input_ids": [7, 8, 9], **change}
    with pytest.raises(package.InputError, match=fault):
        package.trajectories({name: value for name, value in columns.items() if value is not None})


def test_rows_of_a_file_are_columns_again(tmp_path):
    columns, _ = columns_of(7)
    package.write(tmp_path / "rows.safetensors", package.trajectories(columns))
    read = package.read(tmp_path / "rows.safetensors")
    again = package.trajectories({"offsets": read.offsets, "input_ids": read.input_ids, "loss_weights": read.loss_weights})
    assert np.shares_memory(again.input_ids, read.input_ids) and json.dumps(again.loss_weights.tolist())
    assert again.loss_weights.tolist() == read.loss_weights.tolist()
