# SPDX-License-Identifier: Apache-2.0
"""`espalier sample`: completions of prompts as rows, against Transformers' generate, and what a user of it sees."""

import json
import re
import signal
import subprocess
import time

import pytest
import torch

import transformers_reference as reference
from conftest import REPOSITORY, seed_of
from small_models import MODELS, MORE_FAMILIES, WINDOWS_AND_ROPES, random_rows, write_rows
from test_against_transformers import init_model

VOCABULARY = MODELS["llama"]["vocab_size"]
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7], [5, 6, 7, 12, 13], [14], [5, 6, 7], [15, 16, 17, 18, 19, 20, 21, 22, 23]]


def write_prompts(folder, prompts=PROMPTS):
    return write_rows(folder / "prompts.jsonl", [{"input_ids": prompt} for prompt in prompts])


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path)


@pytest.fixture
def sample(espalier, model, prompts, tmp_path):
    """Runs the command; its rows, with what it printed as rows.done."""

    class Rows(list):
        pass

    def run(*flags, model=model, data=prompts, out="out.jsonl", check=True, read=True):
        done = espalier("sample", "--model", model, "--data", data, "-o", tmp_path / out, *flags, check=check)
        rows = Rows(reference.read_rows(tmp_path / out) if read and done.returncode == 0 else [])
        rows.done = done
        return rows

    return run


def greedy_by_transformers(model_folder, prompts, rows):
    """Each prompt, and the likeliest token after every place of its row from there on: the row itself where it is greedy."""
    model = reference.load_model(model_folder, torch.float64).eval()
    with reference.norms_in_model_dtype(torch.float64), torch.no_grad():
        logits = [model(torch.tensor([row]), use_cache=False).logits[0] for row in rows]
    return [prompt + each[len(prompt) - 1:-1].argmax(-1).tolist() for prompt, each in zip(prompts, logits, strict=True)]


def check_greedy(espalier, model_folder, tmp_path):
    prompts = [row["input_ids"][:20] for row in random_rows(3, "sft")] + PROMPTS
    out = tmp_path / "greedy.jsonl"
    espalier("sample", "--model", model_folder, "--data", write_prompts(tmp_path, prompts), "-o", out, "--dtype", "float64",
             "--temperature", 0, "--max-new-tokens", 12, "--ignore-stop-ids", "--batch-size", 5, "--token-budget", 16)  # fmt: skip
    ours = [row["input_ids"] for row in reference.read_rows(out)]
    assert ours == greedy_by_transformers(model_folder, prompts, ours)
    assert [len(row) for row in ours] == [len(prompt) + 12 for prompt in prompts]


CONFIGS = MODELS | WINDOWS_AND_ROPES | MORE_FAMILIES


@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_completions_are_those_of_transformers(espalier, tmp_path, kind):
    check_greedy(espalier, init_model(espalier, tmp_path, CONFIGS[kind]), tmp_path)


def test_the_comparison_notices_another_model(espalier, tmp_path):
    """Negative control: a window that is one too large."""
    folder = init_model(espalier, tmp_path, WINDOWS_AND_ROPES["mistral"])
    check_greedy(espalier, folder, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["sliding_window"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    changed = [row["input_ids"] for row in reference.read_rows(tmp_path / "greedy.jsonl")]
    prompts = [row["input_ids"] for row in reference.read_rows(tmp_path / "prompts.jsonl")]
    assert changed != greedy_by_transformers(folder, prompts, changed)


def test_rows_are_trajectories_with_behaviour_logprobs(sample, espalier, model, tmp_path):
    rows = sample("--samples", 3, "--max-new-tokens", 9, "--ignore-stop-ids", "--dtype", "float64", "--seed", seed_of(1))
    assert [row["trajectory_id"] for row in rows] == [f"{p}/sample-{k}" for p in range(6) for k in range(3)]
    assert [row["group_id"] for row in rows] == [str(p) for p in range(6) for _ in range(3)]
    for row, prompt in zip(rows, [prompt for prompt in PROMPTS for _ in range(3)], strict=True):
        assert row["input_ids"][:len(prompt)] == prompt and len(row["input_ids"]) == len(prompt) + 9
        assert row["loss_mask"] == [0] * len(prompt) + [1] * 9
    espalier("logprobs", "--model", model, "--data", tmp_path / "out.jsonl", "--dtype", "float64", "-o", tmp_path / "again.jsonl")
    for row, again in zip(rows, reference.read_rows(tmp_path / "again.jsonl"), strict=True):
        assert row["logprobs"][-9:] == pytest.approx(again["logprobs"][-9:], abs=1e-12)
    assert "log-probs, sampler against training    differ by" in rows.done.stdout
    largest = float(re.search(r"differ by (\S+) at most", rows.done.stdout)[1])
    assert largest < 1e-12 and "(144 tokens, 16 rows)" not in rows.done.stdout and "(144 tokens of 16 rows)" in rows.done.stdout
    # Other commands take them as they are.
    inspected = json.loads(espalier("inspect", "--data", tmp_path / "out.jsonl", "--json").stdout)
    assert inspected["trajectories"] == 18
    scored = [{**row, "reward": float(index % 3)} for index, row in enumerate(rows)]
    espalier("train", "--model", model, "--data", write_rows(tmp_path / "scored.jsonl", scored), "--objective", "grpo",
             "--out", tmp_path / "run", "--dtype", "float64", "--steps", 1, "--learning-rate", 1e-4)  # fmt: skip
    (metrics,) = reference.read_rows(tmp_path / "run/metrics.jsonl")
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-9)


def test_the_same_command_samples_the_same(sample, espalier, tmp_path):
    flags = ["--samples", 2, "--max-new-tokens", 12, "--seed", 3]
    sample(*flags, out="first.jsonl"), sample(*flags, out="second.jsonl")
    assert (tmp_path / "first.jsonl").read_bytes() == (tmp_path / "second.jsonl").read_bytes()
    assert list(sample(*flags)) != list(sample(*flags[:-1], 4))
    sample(*flags, out="out.safetensors", read=False)
    assert espalier("inspect", "--data", tmp_path / "out.safetensors").returncode == 0


def test_temperature_and_truncation(sample, espalier, model, tmp_path):
    """Log-probabilities are those of the whole distribution at the temperature, whatever is left out of it, and `logprobs` computes
    the same."""
    greedy = sample("--temperature", 0, "--max-new-tokens", 8, "--dtype", "float64")
    for flags in (["--top-k", 1], ["--top-p", 1e-6], ["--top-k", 5, "--top-p", 1e-6]):
        narrow = sample(*flags, "--max-new-tokens", 8, "--dtype", "float64")
        assert [row["input_ids"] for row in narrow] == [row["input_ids"] for row in greedy]
        assert [row["logprobs"] for row in narrow] == [row["logprobs"] for row in greedy]
    cold = sample("--top-k", 1, "--temperature", 0.5, "--max-new-tokens", 8, "--dtype", "float64")
    assert [row["input_ids"] for row in cold] == [row["input_ids"] for row in greedy]
    assert all(sum(a["logprobs"]) > sum(b["logprobs"]) for a, b in zip(map(numbers, cold), map(numbers, greedy)))
    assert {(row["temperature"], row["top_k"]) for row in cold} == {(0.5, 1)} and "top_p" not in cold[0]
    # Of one token that is left, the log-probability is 0.
    nats = -sum(sum(row["logprobs"][-8:]) for row in cold) / (8 * len(cold))
    assert float(re.search(r"leave, which are (\S+) nats higher on average", cold.done.stderr)[1]) == pytest.approx(nats, rel=1e-2)
    for flags, agrees in (([], True), (["--temperature", 0.5], True), (["--temperature", 0.51], False)):
        espalier("logprobs", "--model", model, "--data", tmp_path / "out.jsonl", "--dtype", "float64", *flags,
                 "-o", tmp_path / "again.jsonl")  # fmt: skip
        again = [row["logprobs"][-8:] for row in reference.read_rows(tmp_path / "again.jsonl")]
        assert ([row["logprobs"][-8:] for row in cold] == [pytest.approx(row, abs=1e-12) for row in again]) == agrees
    assert float(re.search(r"differ by (\S+) at most", cold.done.stdout)[1]) < 1e-12


def numbers(row):
    return {"logprobs": row["logprobs"][1:]}


def test_stop_ids(sample, model, tmp_path):
    ends = sample("--max-new-tokens", 200, "--samples", 4, "--stop-id", 3, 4)
    for row in ends:
        completion = [token for token, mask in zip(row["input_ids"], row["loss_mask"]) if mask]
        assert not {3, 4} & set(completion[:-1])
    assert re.search(r"completions that reached a stop token +[1-9]\d* of 24", ends.done.stdout), ends.done.stdout
    assert "has no end-of-text token" in sample("--max-new-tokens", 2).done.stderr
    (model / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    try:
        assert list(sample("--max-new-tokens", 200, "--samples", 4)) == list(ends)
        long = sample("--max-new-tokens", 20, "--ignore-stop-ids")
        assert all(sum(row["loss_mask"]) == 20 for row in long)
    finally:
        (model / "generation_config.json").unlink()


def test_prompts_are_what_stands_before_the_loss(sample, tmp_path):
    data = write_rows(tmp_path / "masked.jsonl", [{"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "trajectory_id": "a",
                                                   "group_id": "g"}])  # fmt: skip
    (row,) = sample("--max-new-tokens", 3, "--ignore-stop-ids", data=data)
    assert row["input_ids"][:2] == [5, 6] and row["loss_mask"] == [0, 0, 1, 1, 1]
    assert (row["trajectory_id"], row["group_id"]) == ("a/sample-0", "g")


def test_completions_as_text(espalier, tmp_path):
    model = tmp_path / "model"
    espalier("init", "--config", REPOSITORY / "examples/tiny_llama.json", "--out", model, "--tokenizer", "bytes",
             variables={})  # fmt: skip
    chat = {"id": "c", "messages": [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat) + "\n")
    espalier("prepare", "--model", model, "--per-turn", tmp_path / "chats.jsonl", "-o", tmp_path / "rows.jsonl")
    done = espalier("sample", "--model", model, "--data", tmp_path / "rows.jsonl", "-o", tmp_path / "out.jsonl", "--text",
                    "--max-new-tokens", 7, variables={})  # fmt: skip
    assert "\nc/turn-0/sample-0 (" in done.stdout
    espalier("inspect", "--model", model, "--data", tmp_path / "out.jsonl")


@pytest.mark.parametrize(("flags", "words"), [
    (["--temperature", -1], "expected a finite number of at least 0, received -1"),
    (["--temperature", "nan"], "received nan"),
    (["--top-p", 1.5], "received 1.5"),
    (["--top-p", 0], "top-p: expected above 0"),
    (["--top-k", -2], "received -2"),
    (["--samples", 0], "received 0"),
    (["--max-new-tokens", 0], "received 0"),
    (["--batch-size", 0], "received 0"),
    (["--stop-id", VOCABULARY], f"stop-id: expected ids below the vocabulary size {VOCABULARY}, received {VOCABULARY}"),
    (["--stop-id", "end"], "received end"),
    (["--text"], "tokenizer.json"),
    (["--check", -1], "received -1"),
])  # fmt: skip
def test_bad_flags_are_one_clear_error(sample, tmp_path, flags, words):
    done = sample(*flags, check=False).done
    assert done.returncode in (1, 2) and words in done.stderr, done.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_bad_input_leaves_what_was_there(sample, tmp_path, model):
    (tmp_path / "out.jsonl").write_text("good\n")
    most = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    for prompt, words in ([[VOCABULARY]], "received"), ([[1] * most], f"expected a prompt of fewer than {most} tokens"):
        done = sample(data=write_prompts(tmp_path, prompt), check=False).done
        assert done.returncode == 1 and words in done.stderr, done.stderr
    (model / "generation_config.json").write_text('{"eos_token_id": "end"}')
    try:
        done = sample(check=False).done
        assert done.returncode == 1 and "eos_token_id: expected a token id or a list of them" in done.stderr
    finally:
        (model / "generation_config.json").unlink()
    done = sample(out="absent/out.jsonl", check=False).done
    assert done.returncode == 1 and "absent" in done.stderr
    assert (tmp_path / "out.jsonl").read_text() == "good\n"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_leaves_no_half_file(model, prompts, tmp_path, name):
    folder = tmp_path / "signalled"
    folder.mkdir()
    process = subprocess.Popen([str(REPOSITORY / "bin/espalier"), "sample", "--model", str(model), "--data", str(prompts), "-o",
                                str(folder / "out.jsonl"), "--samples", "100000", "--max-new-tokens", "40",
                                "--ignore-stop-ids"], stderr=subprocess.PIPE, text=True)  # fmt: skip
    while "trajectories" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(0.5)
    process.send_signal(getattr(signal, name))
    assert process.wait() == -getattr(signal, name)
    process.stderr.close()
    assert not list(folder.iterdir())


def test_prompts_are_scored(espalier, model, sample, tmp_path):
    """As `espalier logprobs` does, whatever the temperature; without the flag prompts have zeros."""
    flags = ("--dtype", "float64", "--seed", 3, "--temperature", 0.7, "--max-new-tokens", 3)
    scored = sample(*flags, "--prompt-logprobs", out="scored.jsonl")
    espalier("logprobs", "--model", model, "--data", tmp_path / "scored.jsonl", "-o", tmp_path / "own.jsonl", "--dtype", "float64",
             "--temperature", 1)  # fmt: skip
    for prompt, row, own, plain in zip(PROMPTS, scored, reference.read_rows(tmp_path / "own.jsonl"), sample(*flags), strict=True):
        size = len(prompt)
        assert row["logprobs"][1:size] == pytest.approx(own["logprobs"][1:size], abs=1e-12) and min(row["logprobs"][1:size], default=-1) < 0
        assert row["input_ids"] == plain["input_ids"] and plain["logprobs"][1:size] == [0] * (size - 1)
        assert row["logprobs"][size:] == pytest.approx(plain["logprobs"][size:], abs=1e-12)
