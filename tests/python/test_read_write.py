# SPDX-License-Identifier: Apache-2.0
"""espalier.read, espalier.write and espalier.inspect: rows of files in Python, and what the command says of them."""

import json
import os
import signal
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file

import espalier as package
from conftest import seed_of
from espalier.io.rules import checked
from espalier.native import core

ROWS = [
    {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "logprobs": [None, -0.5, -0.25], "reward": 1.5, "group_id": "a",
     "trajectory_id": "first", "chosen": True, "pair_id": 7},
    {"input_ids": [5, 6], "loss_weights": [0.5, 2.0], "ref_logprobs": [0, -1.0], "advantage": -0.1, "group_id": "b"},
    {"input_ids": [9], "routed_experts": [[1, 2]], "advantages": [0.25]},
]  # fmt: skip


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst", "rows.safetensors"])
def test_what_is_written_is_read_back(tmp_path, name):
    package.write(tmp_path / name, ROWS)
    rows = package.read(tmp_path / name)
    assert len(rows) == 3 and rows.num_tokens == 6
    assert rows.offsets.tolist() == [0, 3, 5, 6] and rows.input_ids.tolist() == [5, 6, 7, 5, 6, 9]
    assert rows.loss_weights.tolist() == [0, 1, 1, 0.5, 2, 1]
    assert rows.logprobs.tolist() == [0, -0.5, -0.25, 0, 0, 0] and rows.present["logprobs"].tolist() == [1, 0, 0]
    assert rows.advantages.tolist() == [0, 0, 0, -0.1, -0.1, 0.25] and rows.reward.tolist() == [1.5, 0, 0]
    assert rows.chosen.tolist() == [1, 0, 0] and rows.pair_id == ["7", "", ""] and rows.group_id == ["a", "b", ""]
    assert rows.routed_experts.tolist() == [[-1, -1]] * 5 + [[1, 2]]
    assert [rows.name(r) for r in range(3)] == ["first", "1", "2"]
    # Rows as separate dicts can be written again.
    package.write(tmp_path / "again.jsonl", list(rows))
    again = package.read(tmp_path / "again.jsonl")
    assert [sorted(row) for row in again] == [sorted(row) for row in rows]
    assert all(np.array_equal(again[r][field], rows[r][field]) for r in range(3) for field in rows[r])


@pytest.mark.parametrize("writes", [package.write, lambda path, rows: package.io.write_rows(rows, path)])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.safetensors"])
def test_rewards_of_turns_and_tokens_of_a_teacher_are_read_back(tmp_path, name, writes):
    writes(tmp_path / name, [
        {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1], "turn_rewards": [1, -0.5]},
        {"input_ids": [5, 6, 7], "ref_topk_ids": [[], [3, 4], None], "ref_topk_logprobs": [None, [-1, -2], []]},
        {"input_ids": [5, 6], "turn_rewards": [2.0], "ref_topk_ids": [[], [1, 0]], "ref_topk_logprobs": [[], [-0.5, -4]]},
    ])  # fmt: skip
    rows = package.read(tmp_path / name)
    assert rows.turn_rewards.tolist() == [1, -0.5, 2] and rows.turn_reward_offsets.tolist() == [0, 2, 2, 3]
    assert rows.ref_topk_ids.tolist() == [[-1, -1]] * 5 + [[3, 4]] + [[-1, -1]] * 2 + [[1, 0]]
    assert rows.ref_topk_logprobs.tolist() == [[0, 0]] * 5 + [[-1, -2]] + [[0, 0]] * 2 + [[-0.5, -4]]
    assert "turn_rewards" not in rows[1] and "ref_topk_ids" not in rows[0]
    package.write(tmp_path / "again.jsonl", list(rows))
    again = package.read(tmp_path / "again.jsonl")
    assert all(np.array_equal(again[r][field], rows[r][field]) for r in range(3) for field in rows[r])


def test_packed_columns_are_views_of_the_file(tmp_path):
    package.write(tmp_path / "rows.safetensors", [{"input_ids": [1, 2, 3], "logprobs": [0, -0.5, -0.25]}] * 1000)
    rows = package.read(tmp_path / "rows.safetensors")
    ids = rows.input_ids
    assert np.shares_memory(ids, rows.input_ids) and not ids.flags.writeable and rows.logprobs.dtype == np.float32
    place, name = ids.__array_interface__["data"][0], str(tmp_path / "rows.safetensors")
    with open("/proc/self/maps") as maps:
        ranges = [line.split("-")[:2] + [line] for line in maps if name in line]
    assert any(int(begin, 16) <= place < int(end.split()[0], 16) for begin, end, _ in ranges)
    del rows
    assert ids[-3:].tolist() == [1, 2, 3]
    assert np.array_equal(load_file(tmp_path / "rows.safetensors")["input_ids"], ids)


def test_several_files_and_patterns(tmp_path):
    for number in (2, 1):
        package.write(tmp_path / f"rows-{number}.jsonl", [[number, 5]])
    assert package.read(str(tmp_path / "rows-*.jsonl")).input_ids.tolist() == [1, 5, 2, 5]
    assert package.read([tmp_path / "rows-2.jsonl", tmp_path / "rows-1.jsonl"]).input_ids.tolist() == [2, 5, 1, 5]
    assert len(package.read(tmp_path / "rows-*.jsonl", limit=1)) == 1
    (tmp_path / "rows-1.jsonl").rename(tmp_path / os.fsdecode(b"rows-\xff.jsonl"))  # no UTF-8
    assert package.read(tmp_path / os.fsdecode(b"rows-\xff.jsonl")).input_ids.tolist() == [1, 5]
    with pytest.raises(package.InputError, match="rows-\ufffd\ufffd.jsonl"):
        package.read(tmp_path / os.fsdecode(b"rows-\xff\xff.jsonl"))
    with pytest.raises(package.InputError, match="expected files that match"):
        package.read(tmp_path / "none-*.jsonl")


def test_bad_rows_are_named_or_skipped(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input_ids": [1, 2], "values": [1, 2]}\n{"input_ids": [1, -2]}\n')
    with pytest.raises(package.InputError, match=rf"^{path}:2: field `input_ids`: expected ") as caught:
        package.read(path)
    assert "received -2" in str(caught.value)
    with pytest.warns(UserWarning) as warned:
        assert len(package.read(path, skip_bad_rows=True)) == 1
    said = [str(warning.message) for warning in warned]
    assert said[0].startswith(f"skipped 1 bad rows of 2, the first: {path}:2: ")
    assert said[1].endswith("ignored: values")
    with pytest.raises(package.InputError, match="limit: expected a whole number from 0, received -1"):
        package.read(path, limit=-1)


BAD = {
    "another field": ({"input_ids": [1], "tokens": [1]}, "row 1: field `tokens`: expected one of input_ids, loss_mask"),
    "no ids": ({"loss_mask": [1]}, "row 1: field `input_ids`: expected a list of token ids, received none in"),
    "a short mask": ({"input_ids": [1, 2], "loss_mask": [1]}, "row 1: field `loss_mask`: expected 2 entries"),
    "too many rewards": ({"input_ids": [1, 2], "turn_rewards": [1, 2]}, "row 1: field `turn_rewards`: expected 1 entries"),
    "uneven teachers": ({"input_ids": [1, 2, 3], "ref_topk_ids": [[], [1], [1, 2]], "ref_topk_logprobs": [[], [-1], [-1, -2]]},
                        "row 1: field `ref_topk_ids`: expected 2 entries for every token that has any, received 1"),
    "half a teacher": ({"input_ids": [1, 2], "ref_topk_ids": [[], [1]]},
                       "row 1: field `ref_topk_logprobs`: expected 2 entries"),
    "a mask of twos": ({"input_ids": [1], "loss_mask": [2]}, "row 1: field `loss_mask`: expected integers from 0 to 1"),
    "real ids": ({"input_ids": [1.5]}, "row 1: field `input_ids`: expected a list of integers, received float64"),
    "large ids": ({"input_ids": [2**31]}, "row 1: field `input_ids`: expected integers from -2147483648 to 2147483647"),
    "nan": ({"input_ids": [1, 2], "logprobs": [0, float("nan")]}, "row 1: field `logprobs`: expected finite"),
    "a late null": ({"input_ids": [1, 2], "logprobs": [0, None]}, "row 1: field `logprobs`: expected a list of"),
    "text": ({"input_ids": [1], "reward": "1"}, "row 1: field `reward`: expected a number, received str"),
    "a number": ({"input_ids": [1], "chosen": 1}, "row 1: field `chosen`: expected a boolean, received int"),
    "a list": ({"input_ids": [1], "group_id": [1]}, "row 1: field `group_id`: expected text or an id, received list"),
    "two weights": ({"input_ids": [1], "loss_mask": [1], "loss_weights": [1]}, "row 1: field `loss_"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_rows_that_cannot_be_read_back_are_not_written(tmp_path, name):
    row, message = BAD[name]
    package.write(tmp_path / "rows.jsonl", [[7]])
    with pytest.raises(package.InputError) as caught:
        package.write(tmp_path / "rows.jsonl", [[1], row])
    assert str(caught.value).startswith(message)
    assert package.read(tmp_path / "rows.jsonl").input_ids.tolist() == [7]  # what was there is still there
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def test_ctrl_c_stops_reading(tmp_path):
    pipe = tmp_path / "rows.jsonl"
    os.mkfifo(pipe)
    line = b'{"input_ids": [' + b"7, " * 20_000 + b"7]}\n"
    broken = []

    def write():
        with open(pipe, "wb") as file:
            for _ in range(100):
                file.write(line)
            os.kill(os.getpid(), signal.SIGINT)
            try:
                for _ in range(1000):  # more than is read between two looks at signals
                    file.write(line)
            except BrokenPipeError:
                broken.append(True)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            package.read(pipe)
    finally:
        writer.join()
    assert broken  # so it did not read to the end first


# Reports.


def some_rows(rng):
    prompt = rng.integers(0, 200, 40).tolist()
    return [{"input_ids": prompt + rng.integers(0, 200, 10).tolist(), "loss_mask": [0] * 40 + [1] * 10, "group_id": "g"}
            for _ in range(6)]  # fmt: skip


def test_a_report_says_what_the_command_says(espalier, tmp_path):
    path = tmp_path / "rows.jsonl"
    package.write(path, some_rows(np.random.default_rng(seed_of(1))))
    report = package.inspect(path)
    said = espalier("inspect", "--data", path, "--html", tmp_path / "page.html").stdout
    assert report.data == json.loads(espalier("inspect", "--data", path, "--json").stdout)
    assert said.replace("--model", "model").startswith(str(report)) and report.html() == (tmp_path / "page.html").read_text()
    assert repr(report).startswith("<espalier.Report of rows.jsonl: ")
    assert report.forest.num_trajectories == 6 and report.data["tree_tokens"] == report.forest.tree_tokens
    # Rows that are in memory, with a title that is text and not HTML.
    other = package.inspect(package.read(path), title="<b>")
    assert other.data == report.data and "<title>&lt;b&gt;" in other.html()
    assert other._repr_html_().startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')


def test_a_report_shows_text_with_a_tokenizer(espalier, models, tmp_path):
    path = tmp_path / "rows.jsonl"
    package.write(path, [[ord(c) for c in text] for text in ("to be or not to be", "to be or else", "to begin")])
    with_text, without = package.inspect(path, model=models["native"]), package.inspect(path)
    assert with_text.html() != without.html() and with_text.data["tree_tokens"] == without.data["tree_tokens"]
    with pytest.raises(package.InputError, match="model: expected a folder with a tokenizer.json"):
        package.inspect(path, model=tmp_path)


def test_packed_files_are_the_same_whatever_part_of_them_was_in_files(tmp_path):
    """Of rows that `espalier import` and `prepare` write, with a mask first and weights later. `memory` is that of a writer in
    bytes."""
    rows = [{**row, "routed_experts": None} for row in ROWS * 5]
    rows += [{"input_ids": list(range(100_000)), "logprobs": [None, *[-1.5] * 99_999]} for _ in range(6)]
    found = []
    for memory in (1 << 40, 1):
        with core.RowWriter(tmp_path / f"{memory}.safetensors", memory=memory) as packed:
            for row in rows:
                packed.add({"loss_mask": None, **row, "logprobs": row.get("logprobs")})
            # Of each column that is larger than a block: a file, beside the one of the whole.
            assert (len(list(tmp_path.glob(".espalier*"))) > 1) == (memory == 1)
        found.append((tmp_path / f"{memory}.safetensors").read_bytes())
    assert found[0] == found[1] and sorted(path.name for path in tmp_path.iterdir()) == [
        "1.safetensors", f"{1 << 40}.safetensors"]
    package.write(tmp_path / "rows.jsonl", [checked(row) for row in rows])
    read, expected = package.read(tmp_path / "1.safetensors"), package.read(tmp_path / "rows.jsonl")
    for name in ("offsets", "input_ids", "loss_weights", "logprobs", "ref_logprobs", "advantages", "reward", "chosen"):
        assert getattr(read, name).tolist() == getattr(expected, name).tolist(), name
    assert (read.group_id, read.pair_id, read.trajectory_id) == (expected.group_id, expected.pair_id, expected.trajectory_id)


BAD_ROWS = [
    {"input_ids": []}, {"input_ids": 5}, {"input_ids": [1, 2**31]}, {"input_ids": [1, -1]}, {"input_ids": [1, "a"]},
    {"input_ids": [1, 1.0]}, {"input_ids": [1, 2], "loss_mask": [0, 2]}, {"input_ids": [1, 2], "loss_mask": [1]},
    {"input_ids": [1, 2], "loss_mask": [0, 1], "loss_weights": [0, 1]}, {"input_ids": [1, 2], "loss_weights": [0, -1]},
    {"input_ids": [1, 2], "labels": [2, -100]}, {"input_ids": [1, 2], "loss_mask": [0, 1], "response_mask": [0, 0]},
    {"input_ids": [1, 2], "logprobs": [None, 0.5]}, {"input_ids": [1, 2], "logprobs": [None, None]},
    {"input_ids": [1, 2], "logprobs": [None, "x"]}, {"input_ids": [1, 2], "old_log_probs": [-1]},
    {"input_ids": [1, 2], "advantages": [0, None]}, {"input_ids": [1, 2], "advantages": [0, 1], "advantage": 1},
    {"input_ids": [1, 2], "reward": "high"}, {"input_ids": [1, 2], "reward": True}, {"input_ids": [1, 2], "top_p": 0},
    {"input_ids": [1, 2], "top_k": 2.5}, {"input_ids": [1, 2], "temperature": -1}, {"input_ids": [1, 2], "chosen": 1},
    {"input_ids": [1, 2], "turn_rewards": [1, 2]}, {"input_ids": [1, 2], "turn_rewards": [1], "reward": 1},
    {"input_ids": [1, 2], "group_id": 1.5}, {"input_ids": [1, 2], "ref_topk_ids": [[], [1]]},
    {"input_ids": [1, 2], "ref_topk_ids": [[], [1, 1]], "ref_topk_logprobs": [[], [-1, -1]]},
    {"input_ids": [1, 2], "ref_topk_ids": [[], [1, 2]], "ref_topk_logprobs": [[], [-1]]},
    {"input_ids": [1, 2], "ref_topk_ids": [[3], [1]], "ref_topk_logprobs": [[-1], [-1]]},
    {"input_ids": [1, 2], "routed_experts": [[1], [2, 3]]}, {"input_ids": [1, 2], "routed_experts": [[1], [-1]]},
    {"input_ids": [1, 2], "routed_experts": [[[1], [1, 2]], [[1], [2]]]}, {"input_ids": [1, 2], "routed_experts": [[], []]},
]  # fmt: skip


def test_rows_of_python_keep_the_rules_of_files(tmp_path):
    """With the same words. The rows that only files refuse are the control: what the first token has is no fault of a rollout."""
    path = tmp_path / "rows.jsonl"

    def refused(call):
        with pytest.raises(package.InputError) as error:
            call()
        return str(error.value)

    for row in BAD_ROWS:
        path.write_text(json.dumps(row) + "\n")
        expected = refused(lambda: package.read(path)).removeprefix(f"{path}:1: ")
        assert expected.startswith("field `") and refused(lambda row=row: core.checked_row(row)) == expected
    path.write_text(json.dumps({"input_ids": [1, 2], "logprobs": [-1, -1]}))
    assert "null or 0 for the first token" in refused(lambda: package.read(path))
    assert core.checked_row({"input_ids": [1, 2], "logprobs": [-1, -1]})["logprobs"] == [None, -1.0]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst", "rows.safetensors"])
def test_a_writer_replaces_a_file_by_a_whole_one_alone(tmp_path, name):
    """Rows of lists and rows of arrays are the same rows."""
    row = {"input_ids": [1, 2, 3], "loss_weights": [0.0, 0.5, 1.0], "logprobs": [None, -0.5, -1.0], "group_id": 7}
    arrays = {**row, "input_ids": np.array([1, 2, 3], np.int32), "loss_weights": np.array(row["loss_weights"])}
    path = tmp_path / name
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), core.RowWriter(path) as writer:
        writer.add(row)
        assert len(list(tmp_path.iterdir())) > 1
        raise KeyboardInterrupt
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1
    found = []
    for each in (row, arrays):
        with core.RowWriter(path) as writer:
            writer.add(each)
            with pytest.raises(package.InputError, match="field `loss_weights`: expected 2 entries"):
                writer.add({**each, "input_ids": [1, 2]})
        found.append(path.read_bytes())
    assert found[0] == found[1] and package.read(path).logprobs.tolist() == [0, -0.5, -1]
