# SPDX-License-Identifier: Apache-2.0
"""What a user sees of the data that a run is given: what counts, what is refused, what is said about it."""

import json
import os
import subprocess
import time

import pytest
from safetensors.numpy import load_file, save_file

from conftest import REPOSITORY
from small_models import MODELS

IDS = [5, 6, 7, 8, 9]


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def first_loss(espalier, model, data, out, *flags):
    espalier("train", "--model", model, "--data", data, "--out", out, "--steps", 1, "--dtype", "float64", *flags)
    return losses(out)[0]


def refusal(espalier, *arguments):
    failed = espalier(*arguments, check=False)
    assert failed.returncode == 1, failed
    assert len(failed.stderr.strip().splitlines()) == 1, failed.stderr
    return failed.stderr


# Fields by the names of others.


@pytest.mark.parametrize("name", ["response_mask", "completion_mask", "assistant_masks", "labels"])
def test_masks_by_other_names_train_on_the_same_tokens(espalier, model, tmp_path, name):
    mask = [0, 0, 1, 1, 0]
    values = [token if bit else -100 for token, bit in zip(IDS, mask)] if name == "labels" else mask
    known = write_rows(tmp_path / "known.jsonl", {"input_ids": IDS, "loss_mask": mask})
    other = write_rows(tmp_path / "other.jsonl", {"input_ids": IDS, name: values})
    everything = write_rows(tmp_path / "all.jsonl", {"input_ids": IDS})
    known_loss = first_loss(espalier, model, known, tmp_path / "a")
    assert first_loss(espalier, model, other, tmp_path / "b") == known_loss
    assert first_loss(espalier, model, everything, tmp_path / "c") != known_loss


@pytest.mark.parametrize("name", ["old_log_probs", "rollout_log_probs"])
def test_behaviour_log_probabilities_by_other_names_count(espalier, model, tmp_path, name):
    row = {"input_ids": IDS, "loss_mask": [0, 0, 1, 1, 1], "advantage": 1.5}
    values = [0, 0, -1.0, -2.0, -3.0]
    known = write_rows(tmp_path / "known.jsonl", {**row, "logprobs": values})
    other = write_rows(tmp_path / "other.jsonl", {**row, name: values})
    without = write_rows(tmp_path / "without.jsonl", row)
    known_loss = first_loss(espalier, model, known, tmp_path / "a", "--objective", "grpo")
    assert first_loss(espalier, model, other, tmp_path / "b", "--objective", "grpo") == known_loss
    assert first_loss(espalier, model, without, tmp_path / "c", "--objective", "grpo") != known_loss


def test_names_that_contradict_are_refused_with_their_place(espalier, tmp_path):
    good = {"input_ids": IDS, "loss_mask": [0, 0, 1, 1, 0], "labels": [-100, -100, 7, 8, -100]}
    data = write_rows(tmp_path / "rows.jsonl", good, {**good, "labels": [-100, -100, 7, -100, -100]})
    message = refusal(espalier, "inspect", "--data", data)
    assert f"{data}:2: field `labels`: expected loss on the same tokens as by `loss_mask`" in message
    assert "no loss at index 3" in message


def test_arrays_of_the_response_alone_are_explained(espalier, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", {"input_ids": IDS, "response_mask": [1, 1]})
    message = refusal(espalier, "inspect", "--data", data)
    assert "expected 5 entries (one for each of input_ids), received 2 (if it covers only the last 2, " in message


def test_every_command_begins_with_what_it_read(espalier, model, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl",
                      {"input_ids": IDS, "loss_mask": [0, 0, 1, 1, 0], "logprobs": [None, -1, -1, -1, -1], "time": 1,
                       "values": [1, 2, 3, 4, 5]})  # fmt: skip
    commands = {"inspect": [], "plan": [], "verify": ["--model", model], "logprobs": ["--model", model, "-o", tmp_path / "o"],
                "train": ["--model", model, "--out", tmp_path / "run", "--steps", 1]}  # fmt: skip
    for command, flags in commands.items():
        first, warning, *_ = espalier(command, "--data", data, *flags).stderr.splitlines()
        used = "(loss_mask); not used by sft: logprobs" if command in ("train", "verify") else "(loss_mask, logprobs)"
        assert first == f"{data}: 1 trajectory, 5 tokens, 2 with loss {used}; ignored: time, values", command
        assert warning.startswith("warning: ") and "are ignored: values (" in warning, command
    dry = espalier("train", "--data", data, *commands["train"], "--dry-run")
    assert dry.stderr.startswith(f"{data}: 1 trajectory, 5 tokens")


def test_no_mask_and_no_log_probabilities_are_said(espalier, model, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", {"input_ids": IDS, "advantage": 1})
    said = espalier("verify", "--model", model, "--data", data, "--objective", "grpo").stderr
    assert "5 tokens, all with loss (no loss_mask given, advantage); no logprobs: the ratio is 1 (on-policy)" in said


def test_packed_files_know_the_names_too(espalier, model, tmp_path):
    import numpy

    mask = numpy.array([0, 0, 1, 1, 0])
    columns = {"offsets": numpy.array([0, 5]), "input_ids": numpy.array(IDS, dtype=numpy.int32)}
    known = write_rows(tmp_path / "known.jsonl", {"input_ids": IDS, "loss_mask": mask.tolist()})
    save_file({**columns, "labels": numpy.where(mask, IDS, -100)}, tmp_path / "labels.safetensors")
    save_file({**columns, "response_mask": mask, "entropy": numpy.zeros(5)}, tmp_path / "mask.safetensors")
    expected = first_loss(espalier, model, known, tmp_path / "a")
    for name in ("labels", "mask"):
        assert first_loss(espalier, model, tmp_path / f"{name}.safetensors", tmp_path / name) == expected
    assert "are ignored: entropy (" in espalier("inspect", "--data", tmp_path / "mask.safetensors").stderr


# Several files, and flags that are given twice.


def test_several_files_train_as_one(espalier, model, tmp_path):
    rows = [{"input_ids": [n, *IDS], "group_id": f"g{n // 2}"} for n in range(6)]
    whole = write_rows(tmp_path / "whole.jsonl", *rows)
    for name, part in {"part-1.jsonl": rows[:2], "part-2.jsonl": rows[2:3], "part-10.jsonl": rows[3:]}.items():
        write_rows(tmp_path / name, *part)
    parts = [tmp_path / f"part-{n}.jsonl" for n in (1, 2, 10)]
    common = ["--model", model, "--batch-size", 2, "--shuffle", "none", "--learning-rate", 0.1]
    espalier("train", *common, "--data", whole, "--out", tmp_path / "one")
    espalier("train", *common, "--data", *parts, "--out", tmp_path / "list")
    espalier("train", *common, "--data", parts[0], "--data", parts[1], f"--data={parts[2]}", "--out", tmp_path / "flags")
    espalier("train", *common, "--data", tmp_path / "part-?.jsonl", tmp_path / "part-1?.jsonl", "--out", tmp_path / "globs")
    assert len(losses(tmp_path / "one")) == 3
    for run in ("list", "flags", "globs"):
        assert losses(tmp_path / run) == losses(tmp_path / "one"), run
        # The run's config lists the files, so it means the same when others match the patterns by then.
        listed = f"data = {json.dumps([str(part) for part in parts], separators=(',', ':'))}"
        assert listed in (tmp_path / run / "config.toml").read_text(), run
    write_rows(tmp_path / "part-3.jsonl", {"input_ids": [60]})
    espalier("train", "--config", tmp_path / "globs/config.toml", "--out", tmp_path / "again")
    assert losses(tmp_path / "again") == losses(tmp_path / "one")
    # Control: the flag replaces the whole list of the file.
    espalier("train", "--config", tmp_path / "globs/config.toml", "--out", tmp_path / "other", "--data", parts[0])
    assert losses(tmp_path / "other") == losses(tmp_path / "one")[:1]


def test_patterns_are_sorted_and_must_match(espalier, tmp_path):
    for name in ("b.jsonl", "a.jsonl"):
        write_rows(tmp_path / name, {"input_ids": [1 if name == "a.jsonl" else 2, *IDS]})
    plan = json.loads(espalier("plan", "--data", tmp_path / "*.jsonl", "--json").stdout)
    assert plan["flat_tokens"] == 12
    assert "a.jsonl, b.jsonl: 2 trajectories" in espalier("inspect", "--data", tmp_path / "*.jsonl").stderr
    message = refusal(espalier, "inspect", "--data", tmp_path / "a.jsonl", tmp_path / "*.json")
    assert f"expected files that match {tmp_path}/*.json, received none" in message
    (tmp_path / "b.jsonl").write_text("bad\n")
    assert f"{tmp_path}/b.jsonl:1: " in refusal(espalier, "inspect", "--data", tmp_path / "*.jsonl")


def test_flags_given_twice_are_refused(espalier, model, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", {"input_ids": IDS})
    flags = ["train", "--model", model, "--data", data, "--out", tmp_path / "run"]
    for more, message in [(["--learning-rate", "1e-5", "--learning-rate", "1e-4"], "--learning-rate was given twice: 1e-5 and 1e-4"),
                          (["--steps=1", "--steps", "1"], "--steps was given twice: 1 and 1"),
                          (["--deterministic", "--deterministic"], "--deterministic was given twice")]:  # fmt: skip
        failed = espalier(*flags, *more, check=False)
        assert failed.returncode == 2 and message in failed.stderr, failed.stderr
    config = tmp_path / "run.toml"
    config.write_text("steps = 3\nlearning-rate = 0.5\n")
    espalier(*flags, "--config", config, "--steps", 2)
    assert len(losses(tmp_path / "run")) == 2


# Files that are not what they seem.


def test_a_packed_file_that_is_truncated_while_it_is_read(espalier, model, tmp_path):
    data = tmp_path / "rows.safetensors"
    espalier("synth", "-o", data, "--trees", 40, "--depth", 3, "--branching", 3, "--node-length", 60, "--vocab-size", 61)
    command = [REPOSITORY / "bin/espalier", "train", "--model", model, "--data", data, "--out", tmp_path / "run",
               "--epochs", "100000", "--batch-size", "8", "--learning-rate", "0"]  # fmt: skip
    run = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run/metrics.jsonl"
    try:
        while run.poll() is None and not (metrics.exists() and metrics.read_text()):
            time.sleep(0.05)
        assert run.poll() is None, run.communicate()
        os.truncate(data, 4096)
        _, error = run.communicate(timeout=300)
    finally:
        if run.poll() is None:
            run.kill()
    assert run.returncode == 1, (run.returncode, error)
    assert f"{data}: was truncated while it was being read" in error.splitlines()[-1], error


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_pipes_in_a_model_folder_are_refused_at_once(espalier, model, tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.iterdir():
        if file.name == name:
            os.mkfifo(folder / name)
        else:
            (folder / file.name).write_bytes(file.read_bytes())
    data = write_rows(tmp_path / "rows.jsonl", {"input_ids": IDS})
    message = espalier("verify", "--model", folder, "--data", data, check=False).stderr.splitlines()[-1]
    assert f"{folder / name}: expected a regular file, received a pipe or device" in message


def test_a_pipe_as_packed_data_is_refused_at_once(espalier, tmp_path):
    os.mkfifo(tmp_path / "rows.safetensors")
    assert "expected a regular file" in refusal(espalier, "inspect", "--data", tmp_path / "rows.safetensors")


def test_tensors_that_look_like_the_models_own_are_refused(espalier, model, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    data = write_rows(tmp_path / "rows.jsonl", {"input_ids": IDS})
    stored = load_file(folder / "model.safetensors")
    carried = {"vision.weight": stored["model.norm.weight"], "model.rotary_emb.inv_freq": stored["model.norm.weight"]}
    save_file({**stored, **carried}, folder / "model.safetensors", {"format": "pt"})
    done = espalier("train", "--model", folder, "--data", data, "--out", tmp_path / "run", "--steps", 1)
    assert "checkpoints carry unchanged: model.rotary_emb.inv_freq, vision.weight" in done.stderr
    saved = load_file(tmp_path / "run/checkpoints/step_1/model.safetensors")
    assert all((saved[name] == carried[name]).all() for name in carried)
    extra = "model.layers.2.mlp.up_proj.weight"
    save_file({**stored, extra: stored["model.layers.1.mlp.up_proj.weight"]}, folder / "model.safetensors")
    for more in ([], ["--dry-run"]):
        failed = espalier("train", "--model", folder, "--data", data, "--out", tmp_path / "no", *more, check=False)
        assert failed.returncode == 1 and not (tmp_path / "no").exists()
        assert f"tensor `{extra}`: config.json says that num_hidden_layers is 2" in failed.stderr


# Bounds.


def test_rows_without_an_end_are_refused(espalier, tmp_path):
    assert "/dev/zero:1: expected a line of at most 1000000 bytes" in refusal(
        espalier, "inspect", "--data", "/dev/zero", "--max-row-bytes", "1MB")
    data = write_rows(tmp_path / "rows.jsonl", {"input_ids": IDS, "x": "y" * 2000}, {"input_ids": IDS})
    assert f"{data}:1: expected a line of at most 1000 bytes" in refusal(
        espalier, "inspect", "--data", data, "--max-row-bytes", 1000)
    skipped = espalier("inspect", "--data", data, "--max-row-bytes", 1000, "--skip-bad-rows").stderr
    assert "skipped 1 bad row of 2" in skipped
    assert espalier("inspect", "--data", data, "--max-row-bytes", "8GiB", check=False).returncode == 2


def test_huge_numbers_in_fields_of_others_do_no_harm(espalier, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"input_ids": [1, 2], "uuid": 340282366920938463463374607431768211455, "score": [1e999, {"a": 1'
                    + "0" * 400 + "}]}\n")
    assert "2 tokens, all with loss (no loss_mask given); ignored: uuid, score" in espalier("inspect", "--data", data).stderr


@pytest.mark.parametrize("flags", [["--epochs", 2**63 - 1, "--batch-size", 1], ["--threads", 100000], ["--threads", -1]])
def test_absurd_numbers_are_refused(espalier, model, tmp_path, flags):
    data = write_rows(tmp_path / "rows.jsonl", *[{"input_ids": IDS}] * 3)
    failed = espalier("train", "--model", model, "--data", data, "--out", tmp_path / "run", *flags, check=False)
    assert failed.returncode in (1, 2) and not (tmp_path / "run").exists()
    assert str(flags[1]) in failed.stderr and len(failed.stderr.splitlines()) <= 2, failed.stderr


def test_huge_batches_and_warm_ups_are_not_overflowed(espalier, model, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", *[{"input_ids": IDS}] * 3)
    flags = ["train", "--model", model, "--data", data, "--out", tmp_path / "run", "--limit", 2**63 - 1]
    for name in ("batch-size", "warmup-steps", "save-every"):
        refused = espalier(*flags, f"--{name}", 2**63 - 1, check=False)
        expected = f"--{name}: expected a whole number of at most {10**12}, received {2**63 - 1}"
        assert refused.returncode == 2 and expected in refused.stderr
    done = espalier(*flags, "--batch-size", 10**12, "--warmup-steps", 10**12, "--save-every", 10**12)
    assert f"warning: --warmup-steps {10**12} is not less than the 1 step of" in done.stderr
    assert len(losses(tmp_path / "run")) == 1


@pytest.mark.parametrize("key, value", [
    ("num_hidden_layers", 2**31 - 1), ("vocab_size", 2**60), ("head_dim", 0), ("hidden_size", 2**31 - 1),
    ("num_attention_heads", 2**31 - 1), ("intermediate_size", 2**62)])  # fmt: skip
def test_absurd_models_are_refused_before_anything_is_allocated(espalier, tmp_path, key, value):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**MODELS["llama"], key: value}))
    data = write_rows(tmp_path / "rows.jsonl", {"input_ids": IDS})
    for command in (["init", "--config", config, "--out", tmp_path / "m"], ["plan", "--model", tmp_path, "--data", data]):
        message = refusal(espalier, *command)
        assert f"{config}: {key}: expected an integer from 1 to" in message and str(value) in message


def test_trajectories_beyond_the_models_positions_are_told_of(espalier, model, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", {"input_ids": IDS}, {"input_ids": [1] * 130}, {"input_ids": [2] * 140})
    said = espalier("plan", "--model", model, "--data", data).stderr
    assert "warning: 2 of 3 trajectories are longer than max_position_embeddings" in said
    assert "128: the longest has 140 tokens" in said


def test_no_control_character_reaches_the_terminal(espalier, tmp_path):
    folder = tmp_path / "a\x1b[31m\u202e"
    folder.mkdir()
    data = folder / "rows\u009b.jsonl"
    evil = "\x1b]0;owned\x07\u202e\u009b"
    write_rows(data, {"input_ids": IDS, "trajectory_id": evil, evil: 1}, {"input_ids": IDS, "reward": evil})
    runs = [espalier("inspect", "--data", data, check=False), espalier("inspect", "--data", data, "--skip-bad-rows"),
            espalier("inspect", "--data", folder / "none*", check=False), espalier("plan", "--data", data, "--limit", 1),
            espalier("synth", "-o", folder / "s.jsonl", "--trees", 1), espalier("inspect", f"--{evil}", check=False)]  # fmt: skip
    for run in runs:
        text = run.stdout + run.stderr
        assert not any((ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160 or c == "\u202e" for c in text), repr(text)
    assert "\\x1B[31m\\u202E" in runs[0].stderr
