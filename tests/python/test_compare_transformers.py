# SPDX-License-Identifier: Apache-2.0
"""bench/compare_transformers.py on a tiny model: the table that it makes, and that both sides must agree."""

import subprocess
import sys

import pytest

from conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "bench"))
import compare_transformers
import transformers_step

SMALL = ["--quick", "--rounds", "2", "--max-tokens", "7000", "--threads", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory, espalier):
    folder = tmp_path_factory.mktemp("compare") / "tiny"
    espalier("init", "--config", REPOSITORY / "examples/tiny_llama.json", "--out", folder, "--tokenizer", "bytes")
    return folder


def tables(text):
    """Every table as a list of rows by header."""
    found = []
    for block in text.split("\n\n"):
        lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines() if line[:1] == "|"]
        if lines:
            header, rule, *rows = lines
            assert all(len(row) == len(header) for row in [rule, *rows])
            found.append([dict(zip(header, row)) for row in rows])
    return found


@pytest.mark.nightly
def test_the_table(model, tmp_path):
    out = tmp_path / "table.md"
    command = [sys.executable, REPOSITORY / "bench/compare_transformers.py", *SMALL, "--models", model, "-o", out,
               "--dtypes", "float32,bfloat16"]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == out.read_text().strip()
    assert "torch" in done.stdout and "--rounds 2" in done.stdout and "round 2" in done.stderr
    times, agreement = tables(done.stdout)
    expected = [(dtype, data) for dtype in ("float32", "bfloat16")
                for data in ("ratio 1", "ratio 4", "turns of 1 conversation")]  # fmt: skip
    assert [(row["dtype"], row["data"]) for row in times] == expected
    assert [(row["dtype"], row["data"]) for row in agreement] == expected
    for row in times:
        low, high = map(float, row["low .. high"].split(" .. "))
        speedup, bound, share = (float(row[key]) for key in ("speed-up", "bound", "speed-up / bound"))
        rounding = 0.006 * (1 + share * (1 / speedup + 1 / bound))  # of three values with two digits after the point
        assert low <= speedup <= high and share == pytest.approx(speedup / bound, abs=rounding)
        if abs(share - float(row["goal"])) > 0.01:
            assert row["met"] == ("yes" if share > float(row["goal"]) else "no")
        ratio = float(row["flat / tree"])
        assert bound == 1 if row["data"] == "ratio 1" else 1 < bound <= ratio + 0.01
        assert ratio == pytest.approx({"ratio 1": 1, "ratio 4": 4}.get(row["data"], ratio), rel=0.03)
    for row in agreement:
        limits = {"float32": (1e-5, 1e-5), "bfloat16": (2e-2, 0.2)}[row["dtype"]]
        assert float(row["relative difference"]) <= limits[0] and int(row["batch size"]) in (1, 2)
        assert float(row["relative difference of norms"]) <= limits[1]


def run_here(model, capsys, *more):
    status = compare_transformers.main([*SMALL, "--models", str(model), "--conversations", "0", *more])
    return status, capsys.readouterr()


@pytest.mark.parametrize("change, what", [
    (lambda rows: rows[:-1], "losses"),
    (lambda rows: [row._replace(ids=row.ids[:-1] + [row.ids[-1] ^ 1]) for row in rows], "losses"),
    (lambda rows: [row._replace(weights=[1.0] * len(row.ids)) for row in rows], "losses"),
])  # fmt: skip
def test_other_trajectories_on_one_side_are_noticed(model, capsys, monkeypatch, change, what):
    """Negative control: a row less, one other token per row, or loss elsewhere, on the side of Transformers alone."""
    read = transformers_step.read_trajectories
    monkeypatch.setattr(transformers_step, "read_trajectories", lambda path: change(read(path)))
    status, printed = run_here(model, capsys, "--ratios", "1")
    assert status == 1 and printed.out == ""
    assert f"the {what} of the two sides differ" in printed.err.splitlines()[-1]


def test_another_gradient_is_noticed(model, capsys, monkeypatch):
    """Negative control: equal losses, but the gradients of one weight are lost."""
    step = transformers_step.TransformersSide.step

    def lossy_step(side, batches):
        result = step(side, batches)
        side.model.base_model.layers[0].mlp.down_proj.weight.grad = None
        return result

    monkeypatch.setattr(transformers_step.TransformersSide, "step", lossy_step)
    status, printed = run_here(model, capsys, "--ratios", "1")
    assert status == 1 and "the gradient norms of the two sides differ" in printed.err


def test_batches_are_exact():
    """Padding, order and what is left out, by hand."""
    rows = [transformers_step.Trajectory([5, 6, 7], [9, 0, 1]), transformers_step.Trajectory([1, 2, 3, 4, 8], [0, 1, 0, 2, 0]),
            transformers_step.Trajectory([9, 9], [1, 0]), transformers_step.Trajectory([3], [1])]  # fmt: skip
    (batch,) = transformers_step.make_batches(rows, 4)
    assert batch.input_ids.tolist() == [[1, 2, 3], [5, 6, 0]] and batch.tokens == 5
    assert batch.rows.tolist() == [0, 2, 4] and batch.targets.tolist() == [2, 4, 7]
    assert batch.weights.tolist() == [0.25, 0.5, 0.25]
    assert [each.input_ids.tolist() for each in transformers_step.make_batches(rows, 1)] == [[[1, 2, 3]], [[5, 6]]]


def test_data_given_as_a_file(model, tmp_path, capsys, espalier):
    rows = tmp_path / "rows.safetensors"
    espalier("synth", "-o", rows, "--depth", 3, "--vocab-size", 320, "--node-length", 20, "--loss-rate", 0.5)
    status, printed = run_here(model, capsys, "--ratios", "none", "--data", str(rows), "--token-budget", "80")
    assert status == 0, printed.err
    times, agreement = tables(printed.out)
    assert [row["data"] for row in times] == ["rows.safetensors"] and int(agreement[0]["micro-batches"]) > 1


@pytest.mark.parametrize("flags, words", [
    (["--models", "nowhere"], "--models nowhere"),
    (["--data", "nowhere.jsonl"], "--data nowhere.jsonl"),
])  # fmt: skip
def test_what_is_missing_is_named(capsys, flags, words):
    assert compare_transformers.main(["--quick", *flags]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("line, words", [
    ('{"input_ids": [1, 2], "loss_mask": [1, 0]}', "no token carries loss"),
    ('{"ids": [1, 2]}', "docs/data-format.md"),
])  # fmt: skip
def test_bad_rows_are_named(model, capsys, tmp_path, line, words):
    data = tmp_path / "rows.jsonl"
    data.write_text(line + "\n")
    status, printed = run_here(model, capsys, "--ratios", "none", "--data", str(data))
    assert status == 1 and str(data) in printed.err and words in printed.err


def test_what_to_run_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(compare_transformers, "SMOLLM2", tmp_path / "model")
    assert compare_transformers.main(["--quick"]) == 1
    assert "scripts/fetch_smollm2.py" in capsys.readouterr().err
    monkeypatch.setattr(compare_transformers, "ESPALIER", tmp_path / "espalier")
    assert compare_transformers.main(["--quick"]) == 1
    assert "make build" in capsys.readouterr().err


def test_random_trees_reach_their_ratio(tmp_path):
    for ratio in (2, 4, 8, 16, 32, 64):
        sequences = compare_transformers.tree(ratio, 3072 // ratio, 16384, 0, tmp_path / "rows.jsonl")
        prefixes = {tuple(ids[:end]) for ids in sequences for end in range(1, len(ids) + 1)}
        assert sum(map(len, sequences)) / len(prefixes) == pytest.approx(ratio, rel=0.03), ratio
