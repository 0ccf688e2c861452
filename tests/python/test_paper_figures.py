# SPDX-License-Identifier: Apache-2.0
"""bench/papers: each script in a small form writes well-formed files, and the picture says what the table says."""

import csv
import itertools
import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "bench"))
from papers import (
    drawing,
    long_prompts,
    measure,
    packed_tokens,
    predicted,
    prompt_trees,
    tree_training,
    workloads,
)

SVG = "{http://www.w3.org/2000/svg}"
SMALL = ["--quick", "--threads", "1"]
SCRIPTS = {
    "prompt_trees": (prompt_trees, ["--tree-tokens", "64"], 2, [""]),
    "tree_training": (tree_training, ["--conversations", "1", "--most-tokens", "1450"], 10, ["", "_memory"]),
    "long_prompts": (long_prompts, ["--divisor", "256"], 2, [""]),
    "long_prompts_qwen3_moe_granite_hybrid":
        (long_prompts, ["--divisor", "256", "--models", "qwen3_moe", "granite_hybrid"], 4, [""]),
}


@pytest.fixture
def thin(monkeypatch):
    """Models of two layers, of each kind that they have."""
    for name, shape in workloads.SMALL.items():
        fewer = {"num_hidden_layers": 2}
        if "full_attention_interval" in shape:
            fewer["full_attention_interval"] = 2
        if "layer_types" in shape:
            fewer["layer_types"] = ["mamba", "attention"]
        monkeypatch.setitem(workloads.SMALL, name, shape | fewer)


@pytest.mark.usefixtures("thin")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_writes_its_files(name, tmp_path, capsys):
    script, more, least, endings = SCRIPTS[name]
    assert script.main([*SMALL, *more, "-o", str(tmp_path)]) == 0
    with open(tmp_path / f"{name}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= least and all(None not in row and None not in row.values() for row in rows)
    assert all(row["commit"] and "1 thread" in row["hardware"] for row in rows)
    for row in rows:
        assert 0 < float(row["low"]) <= float(row["speed_up"]) <= float(row["high"]) < 100
        assert int(row["tree_tokens"]) <= int(row.get("append_only_tokens") or row["flat_tokens"]) <= int(row["flat_tokens"])
        assert float(row["bound"]) > 0.99
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [f"{name}.csv", *(f"{name}{ending}.svg" for ending in endings)]
    )
    for ending in endings:
        picture = ElementTree.parse(tmp_path / f"{name}{ending}.svg").getroot()
        assert rows[0]["commit"] in "".join(picture.itertext()) and len(list(picture.iter(f"{SVG}circle"))) >= min(least, 8)
    assert "| bound |" in capsys.readouterr().out


def test_packed_tokens(tmp_path, capsys):
    art = tmp_path / "prefix_tree_packing.py"
    art.write_text("import types\n\ndef prefix_tree_pack(rows, *, max_depth):\n"
                   "    return types.SimpleNamespace(tokens=rows[0].new_zeros(len(rows) + max_depth))\n")  # fmt: skip
    assert packed_tokens.main(["--art", str(art), "--conversations", "1"]) == 0
    header, _rule, *lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 3 and header[:3] == ["rows", "sequence packing", "append-only merging"] and header[-1] == "Espalier"
    for line in lines:
        row = {name: int(value.replace(",", "")) for name, value in zip(header[1:], line[1:], strict=True)}
        assert row["Espalier"] <= row.get("TRL", row["Espalier"]) <= row["sequence packing"]
        assert row["Espalier"] <= row["append-only merging"] <= row["sequence packing"]
        assert row["ART, depth 4"] == row["ART, depth 0"] + 4


def test_predictions_lie_within_what_is_possible(tmp_path):
    assert predicted.main(["--quick", "-o", str(tmp_path)]) == 0
    with open(tmp_path / "predicted.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12 and all(1 < float(row["bound"]) <= float(row["ratio"]) * 1.01 for row in rows)
    assert all(1 < float(row["predicted_speed_up"]) < 9 for row in rows)


def circles(chart):
    """Where points of a chart stand."""
    root = ElementTree.fromstring(drawing.svg(chart))
    return [(float(each.get("cx")), float(each.get("cy"))) for each in root.iter(f"{SVG}circle")]


@pytest.mark.parametrize("log", (False, True))
def test_points_stand_where_their_values_are(log):
    places = circles(drawing.Chart("t", "x", "y", [drawing.Series("s", [(1, 1), (2, 2), (4, 4)])], "note", log=log))
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(places)]
    assert all(across > 0 > up for across, up in steps)
    ratio = 1 if log else 2
    assert steps[1][0] == pytest.approx(ratio * steps[0][0], abs=0.2) and steps[1][1] == pytest.approx(ratio * steps[0][1], abs=0.2)
    assert circles(drawing.Chart("t", "x", "y", [drawing.Series("s", [(1, 4), (2, 2), (4, 1)])], "", log=log)) != places


def test_names_are_escaped_and_nothing_to_draw_is_refused():
    text = drawing.svg(drawing.Chart("a < b & c", "x", "y", [drawing.Series("<s>", [(0, 1, 0.5, 2)])], "n"))
    assert "a < b & c" in "".join(ElementTree.fromstring(text).itertext()) and "<s>" not in text
    with pytest.raises(ValueError, match="received none"):
        drawing.svg(drawing.Chart("t", "x", "y", [drawing.Series("s", [])], "n"))


def test_sides_that_differ_stop_the_run():
    sides = [
        measure.Side(name, "tree-packing", 8, [], metrics={"loss": loss, "grad_norm": 1.0})
        for name, loss in (("a", 2.0), ("b", 2.1))
    ]
    with pytest.raises(measure.Failure, match=r"loss: a 2, b 2\.1"):
        measure.check_agreement(sides, 1e-3)
    measure.check_agreement(sides, 0.1)


def test_turns_of_a_conversation_extend_one_another():
    rows = workloads.conversation_turns(1, 4096, 2600)
    assert len(rows) > 3
    assert all(longer["input_ids"][: len(row["input_ids"])] == row["input_ids"] for row, longer in itertools.pairwise(rows))
    sides, append_only_tokens = measure.sides_of(rows, 4096)
    assert [side.name for side in sides] == ["tree", "append-only merging", "sequence packing"]
    assert append_only_tokens == len(rows[-1]["input_ids"])
    assert max(max(row["input_ids"]) for row in rows) < 4096 and all(0 < sum(row["loss_mask"]) < 400 for row in rows)


def test_every_script_is_described():
    text = (REPOSITORY / "bench/results/papers_2026-11-27.md").read_text()
    scripts = {path.name for path in (REPOSITORY / "bench/papers").glob("*.py") if "__main__" in path.read_text()}
    others = {"packed_tokens.py", "peers.py", "predicted.py", "real_workloads.py", "same_training.py"}
    assert scripts == others | {script.SCRIPT for script, *_ in SCRIPTS.values()}
    assert scripts <= set(re.findall(r"\w+\.py", text))
