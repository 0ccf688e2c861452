# SPDX-License-Identifier: Apache-2.0
"""Parquet files as records: Arrow's types become the values that were written, in pieces that other processes can decode."""

import datetime
import decimal
import gzip
import json
import math
import pickle
import re
import subprocess
import sys

import pyarrow
import pytest
from pyarrow import parquet

from conftest import REPOSITORY
from espalier.errors import BadRow, InputError
from espalier.__main__ import run as main
from espalier.io.arrow import CHUNK_BYTES
from espalier.io.sources import chunks_of, records_of

TEXT, REAL, JSON = pyarrow.string(), pyarrow.float64(), pyarrow.json_()


@pytest.fixture
def read(tmp_path):
    """Writes columns {name: array} to a file and returns its records."""
    def run(**columns):
        path = tmp_path / "data.parquet"
        parquet.write_table(pyarrow.table(columns), path)
        pairs = list(records_of(path, 1 << 20, lambda fraction: None))
        assert [where for where, _ in pairs] == [f"{path}: row {number}" for number in range(1, len(pairs) + 1)]
        return [record for _, record in pairs]
    return run


def of_json(values, kind):
    """An array whose texts have type arrow.json. kind(TEXT) and kind(JSON) are its types with and without it."""
    return pyarrow.array(values, kind(TEXT)).cast(kind(JSON))


def kinds():
    """Type of the whole for a type of the leaves, and how a value stands in it."""
    return {
        "a column": (lambda leaf: leaf, lambda value: value),
        "a struct": (lambda leaf: pyarrow.struct([("a", leaf)]), lambda value: {"a": value}),
        "a list": (pyarrow.list_, lambda value: [value, value]),
        "a large list": (pyarrow.large_list, lambda value: [value]),
        "a list of one length": (lambda leaf: pyarrow.list_(leaf, 2), lambda value: [value, value]),
        "a map": (lambda leaf: pyarrow.map_(TEXT, leaf), lambda value: {"k": value}),
        "messages": (lambda leaf: pyarrow.list_(pyarrow.struct([("role", TEXT), ("calls", pyarrow.list_(pyarrow.struct([
            ("arguments", leaf)])))])), lambda value: [{"role": "user", "calls": [{"arguments": value}]}]),
    }  # fmt: skip


def as_arrow(value):
    """pyarrow takes pairs for a map."""
    return list(value.items()) if isinstance(value, dict) and "k" in value else value


@pytest.mark.parametrize("name", kinds())
def test_json_columns_are_values_at_any_depth(read, name):
    kind, stands = kinds()[name]
    values = [{"x": [1, None, "é"]}, [{"type": "text"}], "text", 5, {}]
    texts = [as_arrow(stands(json.dumps(value))) for value in values]
    assert read(c=of_json(texts, kind)) == [{"c": stands(value)} for value in values]
    # Control: the same texts without the type stay texts.
    assert read(c=pyarrow.array(texts, kind(TEXT))) == [{"c": stands(json.dumps(value))} for value in values]


def test_damaged_json_names_the_column(read):
    kind = lambda leaf: pyarrow.list_(pyarrow.struct([("content", leaf)]))
    bad, good = read(messages=of_json([[{"content": "[1"}], [{"content": "[1]"}]], kind))
    assert isinstance(bad, BadRow) and good == {"messages": [{"content": [1]}]}
    assert str(bad).startswith("field `messages[].content`: expected JSON, which is the type of the column, received ")
    twice, = read(c=of_json(['{"a": 1, "a": 2}'], lambda leaf: leaf))
    assert "field `a`: expected each key once" in str(twice)


def test_what_datasets_writes_of_mixed_types(tmp_path, models, tokenizer):
    datasets = pytest.importorskip("datasets")
    user = {"role": "user", "content": "a"}
    rows = [{"messages": [user, {"role": "assistant", "content": [{"type": "text", "text": "one"}]}]},
            {"messages": [user, {"role": "assistant", "content": "two"}]}]
    path, output = tmp_path / "data.parquet", tmp_path / "rows.jsonl"
    datasets.Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(path)
    assert [record for _, record in records_of(path, 1, lambda fraction: None)] == rows
    assert main(["import", str(path), "--model", str(models["native"]), "-o", str(output)]) == 0
    made = [json.loads(line) for line in output.read_text().splitlines()]
    assert [tokenizer.decode([token for token, loss in zip(row["input_ids"], row["loss_mask"]) if loss])
            for row in made] == ["one<|im_end|>", "two<|im_end|>"]  # fmt: skip


def test_nulls_of_structs_are_absent_and_nulls_of_lists_stay(read):
    calls = [{"arguments": {"city": "Paris"}}, {"arguments": {"a": 1, "b": [None, 2]}}, None]
    first, second = read(calls=pyarrow.array([calls, None]), other=pyarrow.array([None, "x"]))
    assert first == {"calls": [{"arguments": {"city": "Paris"}}, {"arguments": {"a": 1, "b": [None, 2]}}, None]}
    assert second == {"other": "x"}
    # A map and a JSON text say themselves which keys they have.
    column = pyarrow.array([[("a", None)]], pyarrow.map_(TEXT, TEXT))
    assert read(map=column, json=of_json(['{"a": null}'], lambda leaf: leaf)) == [{"map": {"a": None}, "json": {"a": None}}]


@pytest.mark.parametrize("real", [pyarrow.float16(), pyarrow.float32(), REAL], ids=str)
@pytest.mark.parametrize("name", kinds())
def test_columns_of_integers_that_became_floats_are_integers_again(read, name, real):
    if real == pyarrow.float16() and name != "a column":
        real = REAL  # pyarrow makes no such arrays of Python's floats
    kind, stands = kinds()[name]
    numbers = [1.0, -0.0, 2048.0, None]
    column = pyarrow.array([as_arrow(stands(number)) for number in numbers], kind(REAL)).cast(kind(real))
    rows = read(json=of_json(["1"] * 4, lambda leaf: leaf), before=pyarrow.array([0.5] * 4), c=column, after=pyarrow.array([
        7.0] * 4))  # fmt: skip
    assert [row["after"] for row in rows] == [7] * 4 and all(type(row["after"]) is int for row in rows)
    assert [row["before"] for row in rows] == [0.5] * 4
    text = json.dumps([row.get("c") for row in rows])
    assert "1" in text and "2048" in text and "." not in text
    # Control: one number with a fraction, and the column has floats.
    column = pyarrow.array([as_arrow(stands(number)) for number in [*numbers, 0.5]], kind(REAL)).cast(kind(real))
    assert "1.0" in json.dumps([row.get("c") for row in read(c=column)])


def test_which_floats_are_integers_is_decided_over_the_whole_file(read):
    rows = read(late=pyarrow.array([1.0] * 1000 + [0.5]), nan=pyarrow.array([1.0, math.nan] * 500 + [None]),
                infinite=pyarrow.array([1.0] * 1000 + [math.inf]), large=pyarrow.array([1.0] * 1000 + [2.0**60]))
    assert [type(rows[0][name]) for name in ("late", "nan", "infinite", "large")] == [float, int, float, float]
    assert math.isnan(rows[1]["nan"]) and "nan" not in rows[1000] and rows[1000]["late"] == 0.5


def test_ids_and_masks_of_pandas_are_read(tmp_path, read):
    path, output = tmp_path / "ids.parquet", tmp_path / "rows.jsonl"
    columns = {"input_ids": pyarrow.array([[1.0, 2.0], [3.0, 4.0]]), "labels": pyarrow.array([[-100.0, 2.0], [-100.0, 4.0]]),
               "group_id": pyarrow.array([7.0, None])}
    parquet.write_table(pyarrow.table(columns), path)
    assert main(["import", str(path), "-o", str(output)]) == 0
    assert [json.loads(line) for line in output.read_text().splitlines()] == [
        {"group_id": "7", "input_ids": [1, 2], "loss_mask": [0, 1]}, {"input_ids": [3, 4], "loss_mask": [0, 1]}]
    columns["input_ids"] = pyarrow.array([[1.0, 2.5], [3.0, 4.0]])  # control
    parquet.write_table(pyarrow.table(columns), path)
    assert main(["import", str(path), "-o", str(output)]) == 1


def test_types_that_json_has_not_come_out_as_objects(read):
    when, price = datetime.datetime(2026, 1, 1), decimal.Decimal("1.50")
    assert read(when=pyarrow.array([when]), price=pyarrow.array([price]), data=pyarrow.array([b"\xff"]), nan=pyarrow.array([
        math.nan]), coded=pyarrow.array(["x"]).dictionary_encode(), key=pyarrow.array([[({"a": 1}, "b")]], pyarrow.map_(
            pyarrow.struct([("a", pyarrow.int64())]), TEXT)))[0] | {"nan": 0} == {
        "when": when, "price": price, "data": b"\xff", "nan": 0, "coded": "x", "key": [({"a": 1}, "b")]}  # fmt: skip


def test_a_value_that_python_cannot_represent_is_a_bad_row(read):
    far = pyarrow.array([2**62, 0], pyarrow.timestamp("us"))
    bad, good = read(input_ids=pyarrow.array([[1, 2], [3, 4]]), at=far)
    assert "field `at`: expected a value that Python can represent" in str(bad) and good["input_ids"] == [3, 4]
    broken = pyarrow.array([b"\xff", b"a"]).view(TEXT)
    bad, good = read(text=broken)
    assert "field `text`: " in str(bad) and good == {"text": "a"}


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json", "safetensors"])
def test_chunks_can_be_pickled_and_are_small(tmp_path, suffix):
    from espalier.io import write_rows

    path = tmp_path / f"rows.{suffix}"
    rows = [{"trajectory_id": str(number), "input_ids": [number, *range(20_000)], "loss_mask": [0, *[1] * 20_000]}
            for number in range(80)]  # fmt: skip
    if suffix == "json":
        path.write_text(json.dumps(rows))
    else:
        write_rows(rows, path)
    pickles = [pickle.dumps(chunk) for chunk in chunks_of(path, 1 << 24, lambda fraction: None)]
    assert len(pickles) > 1
    if suffix in ("parquet", "jsonl"):  # the others are in memory as a whole
        assert max(map(len, pickles)) < 4 * CHUNK_BYTES
    records = [record for data in pickles for _, record in pickle.loads(data).records()]
    assert [{name: record[name] for name in rows[0]} for record in records] == rows
    assert [record for _, record in records_of(path, 1 << 24, lambda fraction: None)] == records


def test_lines_are_parsed_where_they_are_used(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n{"a": NaN}\n{"a"\n' + json.dumps({"a": "x" * 100}) + "\n")
    chunk, = chunks_of(path, 50, lambda fraction: None)
    (_, first), (_, second), (where, third), (_, last) = pickle.loads(pickle.dumps(chunk)).records()
    assert first == {"a": 1} and math.isnan(second["a"])
    assert where == f"{path}:4" and "expected one JSON object" in str(third)
    assert "expected at most 50 bytes (--max-row-bytes), received more" in str(last)


def test_rows_before_damage_come_first(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(b'{"a": "%d"}\n' % (number**9) for number in range(500)))[:-500])
    records = []
    with pytest.raises(InputError, match="ends inside a gzip member"):
        records.extend(record for _, record in records_of(path, 1 << 20, lambda fraction: None))
    assert records == [{"a": str(number**9)} for number in range(len(records))]
    assert len(records) > 64 and len(records) % 64 != 0  # also those of a chunk that is not full


def test_large_files_take_little_memory(tmp_path):
    """All rows are one row group, of which only pieces are read at a time."""
    import numpy as np

    path, rng = tmp_path / "large.parquet", np.random.default_rng(0)
    values = pyarrow.FixedSizeListArray.from_arrays(rng.random(24_000_000), 4000)
    parquet.write_table(pyarrow.table({"logprobs": values, "reward": np.ones(6000)}), path, row_group_size=6000)
    assert path.stat().st_size > 150 << 20
    code = ("import pathlib, re, sys; from espalier.io.sources import chunks_of\n"
            "rows = sum(1 for chunk in chunks_of(pathlib.Path(sys.argv[1]), 1, print) for _ in chunk.records())\n"
            "print(rows, int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]) // 1024)")
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True,
                          env={"PYTHONPATH": str(REPOSITORY / "python")})  # fmt: skip
    rows, mebibytes = map(int, re.findall(r"\d+", done.stdout.splitlines()[-1]))
    assert rows == 6000 and mebibytes < 250
