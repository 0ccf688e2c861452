# SPDX-License-Identifier: Apache-2.0
"""bench/papers/peers.py, same_training.py and real_workloads.py on small models: they compare what they say, and stop where sides
differ."""

import csv
import json
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from conftest import REPOSITORY
from small_models import MODELS

pytest.importorskip("transformers")
sys.path.insert(0, str(REPOSITORY / "bench"))
import espalier as package
from papers import peers, real_workloads, same_training, workloads

ART = """
import types, torch

def prefix_tree_pack(rows, *, max_depth):
    begins = [sum(map(len, rows[:number])) for number in range(len(rows) + 1)]
    same = lambda: torch.cat([torch.full_like(row, number) for number, row in enumerate(rows)])[None]
    return types.SimpleNamespace(
        tokens=torch.cat(rows)[None], group_ids=same(), position_ids=torch.cat([torch.arange(len(row)) for row in rows])[None],
        segments=[types.SimpleNamespace(group_id=number, parent_id=number) for number in range(len(rows))],
        positions_by_sequence=[torch.arange(begin, begin + len(row)) for begin, row in zip(begins, rows)])
"""


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A model of two layers and rows of a few tokens; returns the command line."""
    shape = workloads.SMALL["qwen3"] | {"num_hidden_layers": 2, "hidden_size": 64, "head_dim": 16}
    monkeypatch.setitem(workloads.SMALL, "qwen3", shape)
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    turns = [{"input_ids": ids[:end], "loss_mask": [0] * (end - 3) + [1] * 3} for end in (4, 8, 12)]
    rows = {"answers": workloads.group(12, 5, 4, 4096), "turns": [*turns, {"input_ids": [3, 1, 4, 7, 7], "loss_mask": [0, 0, 0, 1, 1]}]}
    monkeypatch.setattr(peers, "data_sets", lambda args, scratch: rows)
    (tmp_path / "art.py").write_text(ART)
    return ["--quick", "--threads", "1", "--art", str(tmp_path / "art.py"), "-o", str(tmp_path)]


def test_peers_compute_the_same_gradients(small, tmp_path):
    assert peers.main(small) == 0
    with open(tmp_path / "peers.csv", newline="") as file:
        rows = {(row["rows"], row["side"]): row for row in csv.DictReader(file)}
    tokens = {key: int(row["encoded_tokens"]) for key, row in rows.items()}
    assert {side for _, side in rows} >= {"Transformers", "append-only merging", "path vectors", "ART, depth 4", "Espalier, patched model",
                                          "Espalier, own trainer"}  # fmt: skip
    for (name, _), row in rows.items():
        assert float(row["error"]) < 1e-5 and float(row["error_over_transformers"]) < 4 and row["version"]
        assert tokens[name, "Espalier, own trainer"] <= int(row["encoded_tokens"]) <= int(row["flat_tokens"])
    assert ("answers", "append-only merging") not in rows  # none extends another
    assert tokens["turns", "append-only merging"] == 11 + 4 and tokens["turns", "Espalier, patched model"] == 14
    assert tokens["turns", "ART, depth 4"] == int(rows["turns", "Transformers"]["flat_tokens"])


def test_a_peer_that_sees_other_rows_stops_the_run(small, monkeypatch, capsys):
    monkeypatch.setattr(peers, "mask_of", lambda node, parent: (node[:, None] >= 0).expand(-1, len(node)).tril()[None, None])
    assert peers.main(small) == 1
    assert "ART, depth 4: gradients differ from those of float64 by" in capsys.readouterr().err


def test_masks_for_flex_attention_are_the_dense_ones():
    from torch.nn.attention.flex_attention import create_mask

    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(0, 4, (150,), generator=generator)  # nodes without tokens among them
    parent = [int(torch.randint(-1, max(number, 1), (), generator=generator)) for number in range(150)]
    node = torch.arange(150).repeat_interleave(lengths)
    dense = peers.mask_of(node, parent)
    assert torch.equal(create_mask(peers.flex_mask(node, parent), 1, 1, len(node), len(node), device="cpu"), dense)
    for query in (0, 77, len(node) - 1):  # the definition
        path = [int(node[query])]
        while parent[path[-1]] >= 0 and parent[path[-1]] != path[-1]:
            path.append(parent[path[-1]])
        assert dense[0, 0, query].tolist() == [key <= query and int(node[key]) in path for key in range(len(node))]


def test_flash_preference_computes_the_same_gradients(small, monkeypatch, tmp_path):
    pytest.importorskip("flash_pref")
    tree = lambda prompt: workloads.group(*prompt, 2, 4096, seed=prompt[0])
    monkeypatch.setattr(peers, "data_sets", lambda args, scratch: {"pairs": [*tree((12, 5)), *tree((3, 9))], "chain": [
        {"input_ids": [3, 1, 4], "loss_mask": [0, 1, 1]}]})  # fmt: skip
    assert peers.main(small) == 0
    with open(tmp_path / "peers.csv", newline="") as file:
        rows = {(row["rows"], row["side"]): row for row in csv.DictReader(file)}
    assert rows["pairs", "flash-preference"]["encoded_tokens"] == rows["pairs", "path vectors"]["encoded_tokens"]
    assert ("chain", "flash-preference") not in rows


@pytest.fixture
def training(espalier, models, tmp_path):
    """The command line of same_training.py with a model that has a tokenizer, and conversations."""
    config = MODELS["llama"] | {"vocab_size": 259}
    (tmp_path / "config.json").write_text(json.dumps(config))
    espalier("init", "--config", tmp_path / "config.json", "--out", tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_bytes((models["native"] / name).read_bytes())
    turn = lambda number, place: [{"role": "user", "content": f"{number} and {place}?"}, {"role": "assistant", "content": str(number + place)}]
    chats = [{"messages": [{"role": "system", "content": "Add."}, *turn(number, 1), *turn(number, 2)]} for number in range(6)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return ["--quick", "--threads", "1", "--model", str(tmp_path / "model"), "--chats", str(tmp_path / "chats.jsonl"), "--seeds", "2",
            "--batch-size", "3", "--learning-rate", "0.003", "-o", str(tmp_path)]  # fmt: skip


def test_training_is_the_same(training, tmp_path, capsys):
    assert same_training.main(training) == 0
    with open(tmp_path / "same_training.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["2", "4"]
    for row in rows:
        assert row["float64, trees, seed 0"] == row["float64, sequence packing, seed 0"]
        assert row["bfloat16, trees, seed 0"] != row["bfloat16, trees, seed 1"]
    text = "".join(ElementTree.parse(tmp_path / "same_training.svg").getroot().itertext())
    assert "loss of held-out conversations" in text and rows[0]["commit"] in text
    assert "4 losses with equal digits" in capsys.readouterr().err


@pytest.mark.nightly
def test_finished_runs_are_used_again(training, tmp_path, monkeypatch):
    started, run, kept = [], same_training.espalier, ["--runs", str(tmp_path / "runs")]
    monkeypatch.setattr(same_training, "espalier", lambda *words: (started.append(words[0]), run(*words)))
    assert same_training.main([*training, *kept]) == 0 and started.count("train") == 6
    (tmp_path / "runs/bfloat16-trees-1/made_by").unlink()  # as if it had been stopped
    assert same_training.main([*training, *kept]) == 0 and started.count("train") == 7
    chats = tmp_path / "chats.jsonl"
    chats.write_text(chats.read_text().replace(" and 1?", " plus 1?"))  # other rows, by the same command
    same_training.main([*training, *kept])
    assert started.count("train") == 13


def test_curves_that_differ_in_a_digit_stop_the_run():
    curves = {("float64", side, 0): ([2.0, loss], {2: 1.5}) for side, loss in (("trees", 1.0), ("sequence packing", 1.00000002))}
    with pytest.raises(same_training.Failure, match=r"float64: loss 2: trees 1\.0, sequence packing 1\.00000002"):
        same_training.check_float64(curves)


@pytest.mark.parametrize("kind", real_workloads.KINDS)
def test_rows_of_a_kind_of_work(kind):
    count, make = real_workloads.KINDS[kind]
    rows = make(workloads.conversations(count, 4096))
    assert all(len(row["input_ids"]) == len(row["loss_mask"]) and 0 < sum(row["loss_mask"]) for row in rows)
    counts = package.build(rows).statistics()
    assert counts["tree_tokens"] < counts["append_only_tokens"] <= counts["flat_tokens"]
    merges = kind in ("turns of conversations", "turns of a compacted context", "preference pairs")
    assert (counts["append_only_tokens"] < counts["flat_tokens"]) == merges


def test_gains_of_a_kind_of_work(monkeypatch, tmp_path):
    monkeypatch.setitem(workloads.SMALL, "qwen3", workloads.SMALL["qwen3"] | {"num_hidden_layers": 1, "hidden_size": 32})
    kinds = ["turns of conversations", "whole conversations"]
    assert real_workloads.main(["--quick", "--threads", "1", "-o", str(tmp_path), "--kinds", *kinds]) == 0
    with open(tmp_path / "real_workloads.csv", newline="") as file:
        turns, whole = csv.DictReader(file)
    assert float(turns["bound"]) > 1.2 * float(turns["bound_over_merging"]) > 1
    assert whole["bound"] == whole["bound_over_merging"] and whole["speed_up"] == whole["speed_up_over_merging"]
