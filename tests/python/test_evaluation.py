# SPDX-License-Identifier: Apache-2.0
"""train --eval-data: what it writes, what a killed run makes of it, what it refuses."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
import tomllib

import pytest

import transformers_reference as reference
from conftest import REPOSITORY, seed_of
from small_models import random_rows, write_rows


@pytest.fixture(scope="module")
def rows():
    return random_rows(4, "sft")


@pytest.fixture(scope="module")
def data(tmp_path_factory, rows):
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", rows)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "held_out.jsonl", random_rows(5, "sft"))


@pytest.fixture
def flags(model, data, held_out):
    return ["--model", model, "--data", data, "--eval-data", held_out, "--dtype", "float64", "--batch-size", 3,
            "--learning-rate", 0.05, "--no-calibration", "--token-budget", 24]  # fmt: skip


def records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def evaluations(run):
    found = [record for record in records(run) if "eval_loss" in record]
    return [{key: value for key, value in record.items() if key != "eval_seconds"} for record in found]


def files(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_records_are_the_loss_of_each_checkpoint(espalier, flags, held_out, tmp_path):
    """Against log-probabilities of the checkpoints, on the rows of another file format's reader: those of `logprobs`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    done = espalier("train", *flags, "--steps", 5, "--save-every", 1, "--eval-every", 2, "--out", run)
    kinds = [("eval" if "eval_loss" in record else "step", record["step"]) for record in records(run)]
    assert kinds == [("step", 1), ("step", 2), ("eval", 2), ("step", 3), ("step", 4), ("eval", 4), ("step", 5), ("eval", 5)]
    assert all(set(record) - {"step"} == {key for key in record if key.startswith("eval_")}
               for record in records(run) if "eval_loss" in record)  # fmt: skip
    for record in evaluations(run):
        out = tmp_path / f"{record['step']}.jsonl"
        espalier("logprobs", "--model", run / f"checkpoints/step_{record['step']}", "--data", held_out,
                 "--dtype", "float64", "-o", out)  # fmt: skip
        total = weights = 0
        for row, line in zip(reference.read_rows(held_out), reference.read_rows(out)):
            given = row.get("loss_weights", row.get("loss_mask", [1] * len(row["input_ids"])))
            total -= sum(weight * value for weight, value in zip(given[1:], line["logprobs"][1:]))
            weights += sum(given[1:])
        assert record["eval_loss"] == pytest.approx(total / weights, rel=1e-12)
        assert record["eval_nll_per_token"] == pytest.approx(total / weights, rel=1e-12)
        assert f"evaluation after step {record['step']}/5  loss {record['eval_loss']:.6g}" in done.stderr
    assert evaluations(run)[0]["eval_encoded_tokens"] < evaluations(run)[0]["eval_flat_tokens"]
    events = EventAccumulator(str(run)).Reload()
    assert [event.step for event in events.Scalars("eval/loss")] == [2, 4, 5]
    assert events.Scalars("eval/loss")[0].value == pytest.approx(evaluations(run)[0]["eval_loss"], rel=1e-6)


def test_the_run_is_that_without_evaluations(espalier, flags, tmp_path):
    espalier("train", *flags, "--steps", 3, "--eval-every", 1, "--keep-best", "--out", tmp_path / "with")
    without = [flag for at, flag in enumerate(flags) if flag != "--eval-data" and flags[at - 1] != "--eval-data"]
    espalier("train", *without, "--steps", 3, "--out", tmp_path / "without")
    one, other = (files(tmp_path / run / "checkpoints/step_3") for run in ("with", "without"))
    different = {name for name in one if one[name] != other[name]}
    assert different == {"trainer_state.json", "manifest.json"}


def test_killed_at_any_moment_evaluations_count_on(espalier, flags, tmp_path, long_tests):
    """SIGKILL at random moments: records, counters and the best checkpoint are those of an undisturbed run."""
    generator = random.Random(seed_of(21))
    steps = 200 if long_tests else 16
    command = ["train", *flags, "--steps", steps, "--save-every", 3, "--eval-every", 2, "--keep-best",
               "--early-stop", steps]  # fmt: skip
    command = [str(flag) for flag in command]
    espalier(*command, "--out", tmp_path / "whole")
    run, kills, longest = tmp_path / "killed", 0, 0.3
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    size = lambda: (run / "metrics.jsonl").stat().st_size if (run / "metrics.jsonl").exists() else 0
    while kills < (40 if long_tests else 4):
        before, resume = size(), ["--resume"] if run.exists() else []
        process = subprocess.Popen([REPOSITORY / "bin/espalier", *command, "--out", run, *resume], env=environment,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        end = time.monotonic() + 120
        while process.poll() is None and size() == before and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(generator.random() * longest)
        process.kill()
        if process.wait() == -signal.SIGKILL:
            kills += 1
        else:  # it was done before: once more from the beginning, and sooner
            assert process.returncode == 0
            shutil.rmtree(run)
            longest /= 2
    espalier(*command, "--out", run, "--resume")
    assert evaluations(run) == evaluations(tmp_path / "whole")
    for name in (f"step_{steps}", "best"):
        assert files(run / "checkpoints" / name) == files(tmp_path / "whole/checkpoints" / name)
    assert not [path for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]
    best = min(evaluations(run), key=lambda record: record["eval_loss"])
    state = json.loads((run / "checkpoints/best/trainer_state.json").read_text())
    assert state["step"] == best["step"] and state["evaluation"]["best_loss"] == best["eval_loss"]


def test_preferences_report_what_they_do_in_training(espalier, model, tmp_path):
    generator = random.Random(seed_of(8))
    prompt = [generator.randrange(61) for _ in range(4)]
    pairs = []
    for pair in range(3):
        for chosen in (True, False):
            ids = prompt + [generator.randrange(61) for _ in range(5)]
            pairs.append({"input_ids": ids, "loss_mask": [0] * 4 + [1] * 5, "pair_id": pair, "chosen": chosen,
                          "ref_logprobs": [None] + [generator.uniform(-5, -1) for _ in ids[1:]]})  # fmt: skip
    data = write_rows(tmp_path / "pairs.jsonl", pairs)
    espalier("train", "--model", model, "--data", data, "--eval-data", data, "--objective", "dpo", "--dtype", "float64",
             "--steps", 2, "--eval-every", 1, "--no-calibration", "--out", tmp_path / "run")  # fmt: skip
    step, evaluation = records(tmp_path / "run")[2], evaluations(tmp_path / "run")[0]
    for name in ("loss", "reward_margin", "reward_accuracy", "chosen_reward"):  # of the weights after step 1
        assert evaluation[f"eval_{name}"] == pytest.approx(step[name], rel=1e-12, abs=1e-14)


def test_dry_run_looks_at_the_rows_and_config_names_them(espalier, flags, held_out, tmp_path):
    shown = espalier("train", *flags, "--eval-every", 4, "--keep-best", "--out", tmp_path / "run", "--dry-run").stdout
    assert "# evaluation every 4 steps and at the end: 9 trajectories" in shown and not (tmp_path / "run").exists()
    espalier("train", *flags, "--eval-every", 4, "--steps", 1, "--out", tmp_path / "run")
    config = tomllib.loads((tmp_path / "run/config.toml").read_text())
    assert config["eval-data"] == str(held_out) and config["eval-every"] == 4
    again = espalier("train", "--config", tmp_path / "run/config.toml", "--out", tmp_path / "again")
    assert "evaluation after step 1/1" in again.stderr
    assert evaluations(tmp_path / "again") == evaluations(tmp_path / "run")


@pytest.mark.parametrize("flag", [["--eval-every", 2], ["--keep-best"], ["--early-stop", 1]])
def test_flags_of_evaluations_want_rows(espalier, model, data, tmp_path, flag):
    failed = espalier("train", "--model", model, "--data", data, "--out", tmp_path / "run", *flag, check=False)
    assert failed.returncode == 1 and f"{flag[0]}: requires --eval-data FILE" in failed.stderr
    assert not (tmp_path / "run").exists()


def test_rows_that_cannot_be_evaluated_are_refused(espalier, flags, model, data, tmp_path):
    command = ["train", *flags, "--out", tmp_path / "run"]
    early = espalier(*command, "--early-stop", 2, check=False)
    assert early.returncode == 1 and "--early-stop 2: requires --eval-every N" in early.stderr
    silent = write_rows(tmp_path / "silent.jsonl", [{"input_ids": [1, 2], "loss_mask": [0, 0]}])
    foreign = write_rows(tmp_path / "foreign.jsonl", [{"input_ids": [1, 99]}])
    for path, words in [(silent, "eval-data: "), (foreign, "foreign.jsonl:1"), (tmp_path / "none", "none")]:
        for more in ([], ["--dry-run"]):
            failed = espalier("train", "--model", model, "--data", data, "--eval-data", path, "--out", tmp_path / "run",
                              *more, check=False)  # fmt: skip
            assert failed.returncode == 1 and words in failed.stderr.strip().splitlines()[-1], failed.stderr
    assert not list(tmp_path.glob("run/checkpoints/*"))
