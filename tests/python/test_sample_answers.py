# SPDX-License-Identifier: Apache-2.0
"""The demo's group: answers that the model samples to a real prompt, as rows for GRPO."""

import json
import subprocess
import sys

import pytest

from conftest import REPOSITORY


@pytest.fixture(scope="module")
def group(tmp_path_factory, espalier):
    folder = tmp_path_factory.mktemp("group")
    model = folder / "model"
    espalier("init", "--config", REPOSITORY / "examples/tiny_llama.json", "--out", model, "--seed", 2, "--tokenizer", "bytes")
    chat = {"id": "c", "messages": [{"role": "user", "content": "Where is my parcel?"},
                                    {"role": "assistant", "content": "In Ulm."}, {"role": "user", "content": "And now?"},
                                    {"role": "assistant", "content": "Still there."}]}
    (folder / "chats.jsonl").write_text(json.dumps(chat) + "\n")
    espalier("prepare", "--model", model, "--per-turn", folder / "chats.jsonl", "-o", folder / "rows.jsonl")

    def run(*flags, check=True):
        out = folder / "group.jsonl"
        command = [sys.executable, REPOSITORY / "scripts/sample_answers.py", model, folder / "rows.jsonl", "-o", out,
                   "--answers", "3", "--max-new-tokens", "7", *flags]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=check)
        return done if done.returncode else [json.loads(line) for line in out.read_text().splitlines()]

    run.model, run.folder = model, folder
    return run


def test_answers_share_the_prompt_and_have_the_logprobs_of_the_model(group, espalier):
    rows = group()
    prompts = [json.loads(line) for line in (group.folder / "rows.jsonl").read_text().splitlines()]
    prompt = prompts[1]["input_ids"][:prompts[1]["loss_mask"].index(1)]
    assert [row["trajectory_id"] for row in rows] == [f"c/turn-1/answer-{k}" for k in range(3)]
    assert {row["group_id"] for row in rows} == {"c/turn-1"} and len({tuple(row["input_ids"]) for row in rows}) == 3
    for row in rows:
        answer = len(row["input_ids"]) - len(prompt)
        assert row["input_ids"][:len(prompt)] == prompt and 1 <= answer <= 7
        assert row["loss_mask"] == [0] * len(prompt) + [1] * answer and 0 <= row["reward"] <= 1
    out = group.folder / "logprobs.jsonl"
    espalier("logprobs", "--model", group.model, "--data", group.folder / "group.jsonl", "--dtype", "float32", "-o", out)
    for row, ours in zip(rows, map(json.loads, out.read_text().splitlines()), strict=True):
        assert row["logprobs"][len(prompt):] == pytest.approx(ours["logprobs"][len(prompt):], abs=1e-4)
    # The same seed samples the same, another one something else.
    assert group() == rows and group("--seed", 5) != rows


def test_the_group_trains_by_grpo(group, espalier):
    rows = group("--trajectory", "c/turn-0")
    assert {row["group_id"] for row in rows} == {"c/turn-0"}
    data = group.folder / "group.jsonl"
    measured = json.loads(espalier("bench", "--model", group.model, "--data", data, "--objective", "grpo", "--repeats", 1,
                                   "--warmup", 0, "--json").stdout)
    (row,) = measured["rows"]
    assert row["append_only_measured"] is False and row["append_only_tokens"] == row["flat_tokens"] > 2 * row["tree_tokens"]


def test_a_trajectory_that_is_not_there_is_named(group):
    done = group("--trajectory", "nobody", check=False)
    assert done.returncode == 1 and "named nobody" in done.stderr
