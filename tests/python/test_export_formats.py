# SPDX-License-Identifier: Apache-2.0
"""espalier export: what is exported and imported again is the same, and traces share what rows share."""

import json
import re

import numpy as np
import pytest

from conftest import REPOSITORY, seed_of
from espalier.__main__ import run as main
from espalier.io.plain_rows import KNOWN_NAMES


@pytest.fixture
def run(tmp_path, capsys):
    """Runs import or export in this process; returns what it printed."""
    def run(*words, code=0):
        assert main([str(word) for word in words]) == code, capsys.readouterr().err
        return capsys.readouterr().err
    return run


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def random_rows(generator):
    """Rows that share beginnings in groups, with all fields of which traces have a place, as import writes them."""
    rows = []
    for group in range(6):
        stems = [generator.integers(0, 5, 12).tolist() for _ in range(2)]
        for number in range(int(generator.integers(1, 6))):
            ids = stems[int(generator.integers(2))][:int(generator.integers(2, 12))] + generator.integers(0, 5,
                                                                                                          3).tolist()
            loss = [0, *generator.integers(0, 2, len(ids) - 2).tolist(), 1]
            rows.append({
                "trajectory_id": f"é{group}/{number}", "group_id": f"g{group}", "reward": float(generator.integers(3))
            })
            if group % 2:
                rows[-1] |= {"pair_id": f"p{number}", "chosen": bool(generator.integers(2))}
            rows[-1]["input_ids"] = ids
            if group == 5:
                rows[-1]["loss_weights"] = [value * float(generator.random()) for value in loss]
            else:
                rows[-1]["loss_mask"] = loss
            for name, empty in (("logprobs", None), ("ref_logprobs", None), ("advantages", 0.0)):
                if group > 1 or name == "logprobs":
                    rows[-1][name] = [-float(generator.random()) if value else empty for value in loss]
    rows.append({"input_ids": [1, 2], "loss_mask": [0, 1], "advantage": 2.5})
    rows.append({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]})
    return rows


@pytest.mark.parametrize("to, name", [("traces", "x.jsonl"), ("traces", "x.jsonl.zst"), ("parquet", "x.parquet")])
def test_import_of_an_export_gives_the_same_rows(tmp_path, run, to, name):
    for seed in range(5):
        rows = random_rows(np.random.default_rng(seed_of(seed)))
        write(tmp_path / "rows.jsonl", rows)
        error = run("export", tmp_path / "rows.jsonl", "--to", to, "-o", tmp_path / name)
        assert "left out" not in error
        run("import", tmp_path / name, "-o", tmp_path / "again.jsonl")
        assert read(tmp_path / "again.jsonl") == rows


def test_packed_rows_are_the_same_rows_and_inspect_reads_them(tmp_path, run, espalier):
    rows = [
        row for row in random_rows(np.random.default_rng(seed_of(7)))
        if "loss_weights" not in row and "advantage" not in row
    ]
    write(tmp_path / "rows.jsonl", rows)
    run("import", tmp_path / "rows.jsonl", "-o", tmp_path / "rows.safetensors")
    printed = [espalier("inspect", "--data", tmp_path / name) for name in ("rows.jsonl", "rows.safetensors")]
    assert printed[0].stdout.replace("rows.jsonl", "") == printed[1].stdout.replace("rows.safetensors", "")
    assert f"{len(rows)} trajectories" in printed[1].stderr
    run("import", tmp_path / "rows.safetensors", "-o", tmp_path / "again.jsonl")
    again = read(tmp_path / "again.jsonl")
    for row, other in zip(rows, again, strict=True):
        for name in ("logprobs", "ref_logprobs"):  # packed numbers have no null
            if name in row:
                row[name] = [None, *(value or 0.0 for value in row[name][1:])]
        assert row == other


def test_tensors_that_belong_to_no_column_are_ignored_and_named(tmp_path, run):
    from safetensors.numpy import load_file, save_file

    rows = write(tmp_path / "rows.jsonl", [{"input_ids": [1, 2], "loss_mask": [0, 1]}])
    run("import", rows, "-o", tmp_path / "rows.safetensors")
    columns = load_file(tmp_path / "rows.safetensors")
    save_file(columns | {"hidden": np.ones((5, 3), np.float32)}, tmp_path / "more.safetensors")
    error = run("import", tmp_path / "more.safetensors", "-o", tmp_path / "again.jsonl")
    assert read(tmp_path / "again.jsonl") == read(rows) and "ignored: hidden" in error


def test_the_names_of_fields_are_those_of_the_reader():
    source = (REPOSITORY / "src/espalier/data/fields.h").read_text()
    assert KNOWN_NAMES == set(re.findall(r'\{"(\w+)", Field::k', source))


def test_routes_come_through_packed_and_parquet(tmp_path, run):
    rows = [{"input_ids": [1, 2], "loss_mask": [0, 1], "routed_experts": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]}]
    flat = [{**rows[0], "routed_experts": [[0, 1, 2, 3], [4, 5, 6, 7]]}]
    write(tmp_path / "rows.jsonl", rows)
    run("export", tmp_path / "rows.jsonl", "--to", "parquet", "-o", tmp_path / "x.parquet")
    run("import", tmp_path / "x.parquet", "-o", tmp_path / "x.safetensors")
    run("import", tmp_path / "x.safetensors", "-o", tmp_path / "again.jsonl")
    assert read(tmp_path / "again.jsonl") == flat
    error = run("export", tmp_path / "rows.jsonl", "--to", "traces", "-o", tmp_path / "t.jsonl")
    assert "left out, because traces has no field for it: routed_experts (1)" in error
    write(tmp_path / "mixed.jsonl", [*rows, {"input_ids": [3, 4]}])
    run("import", tmp_path / "mixed.jsonl", "-o", tmp_path / "y.safetensors")
    run("import", tmp_path / "y.safetensors", "-o", tmp_path / "mixed_again.jsonl")
    assert [row.get("routed_experts") for row in read(tmp_path / "mixed_again.jsonl")] == [flat[0]["routed_experts"], None]
    write(tmp_path / "mixed.jsonl", [*rows, {"input_ids": [3, 4], "routed_experts": [[1, 2], [3, 4]]}])
    error = run("import", tmp_path / "mixed.jsonl", "-o", tmp_path / "y.safetensors", code=1)
    assert "field `routed_experts`: expected 4 routes per token, as in earlier rows, received 2" in error


def test_turn_rewards_and_a_teachers_tokens_come_through_packed_and_parquet(tmp_path, run):
    rows = [{"turn_rewards": [0.5, -1.0], "input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 0, 1],
             "ref_topk_ids": [[], [5, 6], [], [7, 8]], "ref_topk_logprobs": [[], [-0.5, -1.5], [], [-0.25, -2.5]]},
            {"reward": 1.0, "input_ids": [1, 2], "loss_mask": [0, 1]},
            {"turn_rewards": [2.0], "input_ids": [1, 9], "loss_mask": [0, 1]}]  # fmt: skip
    write(tmp_path / "rows.jsonl", rows)
    run("export", tmp_path / "rows.jsonl", "--to", "parquet", "-o", tmp_path / "x.parquet")
    run("import", tmp_path / "x.parquet", "-o", tmp_path / "x.safetensors")
    run("import", tmp_path / "x.safetensors", "-o", tmp_path / "again.jsonl")
    assert read(tmp_path / "again.jsonl") == rows


def test_a_trace_shares_what_rows_share(tmp_path, run):
    shared = {"group_id": "g", "reward": 1.0, "loss_mask": [0, 0, 1, 0, 1]}
    rows = [{"trajectory_id": "a",
             **shared, "input_ids": [1, 2, 3, 4, 5]}, {"trajectory_id": "b", **shared, "input_ids": [1, 2, 3, 6, 7]},
            {"trajectory_id": "c", "group_id": "g", "reward": 1.0, "input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]},
            {"trajectory_id": "d", "group_id": "h", "input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]}]
    write(tmp_path / "rows.jsonl", rows)
    run("export", tmp_path / "rows.jsonl", "--to", "traces", "-o", tmp_path / "traces.jsonl")
    first, second = read(tmp_path / "traces.jsonl")
    trace, = first["traces"]
    assert first["group"] == {"id": "g"} and second["group"] == {"id": "h"}
    assert [(node.get("parent"), node["token_ids"], node["mask"], node["sampled"])
            for node in trace["nodes"]] == [(None, [1, 2, 3], [False, False, True], True),
                                            (0, [4, 5], [False, True], True), (0, [6, 7], [False, True], True)]
    assert trace["rewards"] == {"reward": {"score": 1.0, "weight": 1.0}}
    assert [row["node"] for row in trace["info"]["espalier"]["rows"]] == [1, 2, 0]
    # What another reader sees: leaves only, where shared loss counts once.
    del trace["info"]
    write(tmp_path / "plain.jsonl", [first])
    run("import", tmp_path / "plain.jsonl", "-o", tmp_path / "rows.jsonl")
    assert [(row["input_ids"], row["loss_mask"]) for row in read(tmp_path / "rows.jsonl")] == [
        ([1, 2, 3, 4, 5], [0, 0, 1, 0, 1]), ([1, 2, 3, 6, 7], [0, 0, 0, 0, 1])]


def test_tokens_of_which_rows_say_different_things_are_not_shared(tmp_path, run):
    rows = [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "logprobs": [None, -1.0, -2.0]},
            {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "logprobs": [None, -1.0, -2.5]},
            {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "logprobs": [None, None, -2.0]}]
    write(tmp_path / "rows.jsonl", rows)
    run("export", tmp_path / "rows.jsonl", "--to", "traces", "-o", tmp_path / "traces.jsonl")
    (episode,) = read(tmp_path / "traces.jsonl")
    assert sum(len(node["token_ids"]) for node in episode["traces"][0]["nodes"]) == 1 + 1 + 2 + 2  # 1; 2; 3, 3; 2 3
    run("import", tmp_path / "traces.jsonl", "-o", tmp_path / "again.jsonl")
    assert read(tmp_path / "again.jsonl") == rows


@pytest.mark.parametrize("name", ["sft.jsonl", "sft.parquet"])
def test_sft_data_of_trl(tmp_path, run, name):
    rows = [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 0], "reward": 1.0}, {"input_ids": [4, 5]},
            {"input_ids": [6, 7], "loss_weights": [0, 1]}]
    write(tmp_path / "rows.jsonl", rows)
    error = run("export", tmp_path / "rows.jsonl", "--to", "trl", "-o", tmp_path / name)
    assert "left out, because trl has no field for it: reward (1)" in error
    if name.endswith("jsonl"):
        assert read(tmp_path /
                    name) == [{"input_ids": [1, 2, 3], "labels": [-100, 2, -100], "completion_mask": [0, 1, 0]},
                              {"input_ids": [4, 5], "labels": [-100, 5], "completion_mask": [0, 1]},
                              {"input_ids": [6, 7], "labels": [-100, 7], "completion_mask": [0, 1]}]
    run("import", tmp_path / name, "-o", tmp_path / "again.jsonl")
    assert read(tmp_path / "again.jsonl") == [{"input_ids": [1, 2, 3],
                                               "loss_mask": [0, 1, 0]}, {"input_ids": [4, 5], "loss_mask": [0, 1]},
                                              {"input_ids": [6, 7], "loss_mask": [0, 1]}]
    write(tmp_path / "weighted.jsonl", [{"input_ids": [1, 2], "loss_weights": [0, 0.5]}])
    before = (tmp_path / name).read_bytes()
    error = run("export", tmp_path / "weighted.jsonl", "--to", "trl", "-o", tmp_path / name, code=1)
    assert "row 1: field `loss_weights`: expected weights of 0 and 1" in error and (tmp_path /
                                                                                    name).read_bytes() == before


def test_nothing_to_export_is_an_error_and_bad_rows_are_named(tmp_path, run):
    write(tmp_path / "empty.jsonl", [])
    assert "expected at least one row, received none" in run("export",
                                                             tmp_path / "empty.jsonl",
                                                             "--to",
                                                             "trl",
                                                             "-o",
                                                             tmp_path / "x.jsonl",
                                                             code=1)
    write(tmp_path / "bad.jsonl", [{"input_ids": [1, 2]}, {"ids": [1]}])
    error = run("export", tmp_path / "bad.jsonl", "--to", "trl", "-o", tmp_path / "x.jsonl", code=1)
    assert "bad.jsonl:2: field `input_ids`: expected a list, received null" in error and not (tmp_path /
                                                                                              "x.jsonl").exists()


def test_the_commands_of_the_program(tmp_path, espalier):
    write(tmp_path / "rows.jsonl", [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "group_id": "g"}])
    espalier("export", tmp_path / "rows.jsonl", "--to", "traces", "-o", tmp_path / "traces.jsonl")
    refused = espalier("plan", "--data", tmp_path / "traces.jsonl", check=False)
    advice = f"run `espalier import {tmp_path}/traces.jsonl -o rows.jsonl` first"
    assert refused.returncode == 1 and advice in refused.stderr
    done = espalier("import", tmp_path / "traces.jsonl", "-o", tmp_path / "rows.safetensors")
    assert done.stderr.endswith(
        f"import: wrote {tmp_path}/rows.safetensors\n") and "1 row, 3 tokens, 2 with loss" in done.stderr
    espalier("inspect", "--data", tmp_path / "rows.safetensors")
