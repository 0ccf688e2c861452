# SPDX-License-Identifier: Apache-2.0
"""train --reference-model: the run is that of rows which have the reference's log-probabilities already."""

import fcntl
import json
import random
import shutil

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import transformers_reference as reference
from conftest import seed_of
from small_models import MODELS, write_rows

OBJECTIVES = {
    "dpo": [],
    "ipo": [],
    "kto": [],
    "opd": [],
    "grpo": ["--kl-coef", 0.2],
    "ppo": ["--kl-coef", 0.2, "--kl-in", "reward"],
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, espalier):
    """Another model of the same vocabulary."""
    folder = tmp_path_factory.mktemp("teacher")
    (folder / "config.json").write_text(json.dumps(MODELS["llama"]))
    espalier("init", "--config", folder / "config.json", "--out", folder / "model", "--seed", seed_of(77))
    return folder / "model"


def rows_of(seed):
    generator = random.Random(seed_of(seed))
    prompt = [generator.randrange(61) for _ in range(5)]
    rows = []
    for row in range(6):
        ids = prompt + [generator.randrange(61) for _ in range(generator.randrange(2, 6))]
        rows.append({"input_ids": ids, "loss_mask": [0] * 5 + [1] * (len(ids) - 5), "pair_id": row // 2,
                     "chosen": row % 2 == 0, "reward": generator.random(), "group_id": row // 3,
                     "logprobs": [0.0] + [generator.uniform(-6, -1) for _ in ids[1:]]})  # fmt: skip
    return rows


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", rows_of(1))


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "held_out.jsonl", rows_of(2))


def test_a_copy_for_saving_is_counted_once_the_reference_is_there(espalier, model, teacher, data, tmp_path):
    espalier("train", "--model", model, "--data", data, "--out", tmp_path / "run", "--steps", 1, "--objective", "dpo",
             "--reference-model", teacher, "--memory-budget", "8GiB", "--save-in-background", "--no-calibration")  # fmt: skip


def with_reference(espalier, teacher, data, out):
    """The rows with ref_logprobs by `espalier logprobs`."""
    espalier("logprobs", "--model", teacher, "--data", data, "--dtype", "float64", "-o", f"{out}.logprobs")
    computed = reference.read_rows(f"{out}.logprobs")
    rows = [{**row, "ref_logprobs": line["logprobs"]} for row, line in zip(reference.read_rows(data), computed)]
    return write_rows(out, rows)


def metrics(run):
    return reference.read_rows(run / "metrics.jsonl")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_run_is_that_of_rows_with_its_logprobs(espalier, model, teacher, data, held_out, tmp_path, objective):
    flags = ["--model", model, "--objective", objective, *OBJECTIVES[objective], "--dtype", "float64", "--steps", 3,
             "--batch-size", 3, "--learning-rate", 0.01, "--token-budget", 20, "--eval-every", 2, "--no-calibration"]  # fmt: skip
    done = espalier("train", *flags, "--data", data, "--eval-data", held_out, "--reference-model", teacher,
                    "--out", tmp_path / "computed")  # fmt: skip
    assert done.stderr.count("reference: log-probabilities of 6 trajectories computed, stored in") == 2
    espalier("train", *flags, "--data", with_reference(espalier, teacher, data, tmp_path / "rows.jsonl"),
             "--eval-data", with_reference(espalier, teacher, held_out, tmp_path / "held_out.jsonl"),
             "--out", tmp_path / "given")  # fmt: skip
    for one, other in zip(metrics(tmp_path / "computed"), metrics(tmp_path / "given"), strict=True):
        for name in ("loss", "grad_norm", "ref_kl", "reverse_kl", "reward_margin", "eval_loss", "eval_reward_margin"):
            assert (name in one) == (name in other)
            if name in one:
                assert one[name] == pytest.approx(other[name], rel=1e-10, abs=1e-13), name
    # Control: without the teacher, by the policy itself, the numbers are others.
    espalier("train", *flags, "--data", data, "--eval-data", held_out, "--reference-model", model, "--out", tmp_path / "self")
    name = "grad_norm"
    assert metrics(tmp_path / "self")[0][name] != pytest.approx(metrics(tmp_path / "computed")[0][name], rel=1e-6)


@pytest.fixture
def command(model, teacher, data, tmp_path):
    return ["train", "--model", model, "--data", data, "--objective", "dpo", "--batch-size", 2, "--save-every", 1,
            "--learning-rate", 0.01, "--no-calibration", "--reference-model", teacher]  # fmt: skip


def test_resume_takes_what_is_kept(espalier, command, tmp_path):
    run, file = tmp_path / "run", tmp_path / "run/ref_logprobs.safetensors"
    espalier(*command, "--steps", 4, "--out", tmp_path / "whole")
    espalier(*command, "--steps", 2, "--out", run)
    kept = file.read_bytes()
    resumed = espalier(*command, "--steps", 4, "--out", run, "--resume").stderr
    assert f"reference: log-probabilities of 6 trajectories from {file}" in resumed and "computed" not in resumed
    for name in ("model.safetensors", "optimizer.safetensors", "trainer_state.json"):
        assert (run / "checkpoints/step_4" / name).read_bytes() == (tmp_path / "whole/checkpoints/step_4" / name).read_bytes()
    assert [line["loss"] for line in metrics(run)] == [line["loss"] for line in metrics(tmp_path / "whole")]
    assert file.read_bytes() == kept == (tmp_path / "whole/ref_logprobs.safetensors").read_bytes()


def test_what_is_kept_is_not_trusted(espalier, command, model, teacher, tmp_path):
    """Values that were changed, a file that is cut, another teacher: computed again; and then a run that began with others
    refuses."""
    run, file = tmp_path / "run", tmp_path / "run/ref_logprobs.safetensors"
    espalier(*command, "--steps", 1, "--out", run)
    kept = file.read_bytes()
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    values = load_file(file)["ref_logprobs"]
    values[6] -= 1
    save_file({"ref_logprobs": values}, tmp_path / "changed.safetensors", metadata=metadata)
    for content, words in [((tmp_path / "changed.safetensors").read_bytes(), "its values are damaged"),
                           (kept[:-5], "is not used"), (b"", "is not used")]:  # fmt: skip
        file.write_bytes(content)
        said = espalier(*command, "--steps", 1, "--out", run, "--resume").stderr
        assert words in said and "computed, stored in" in said
        assert file.read_bytes() == kept
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] *= 1.5
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    failed = espalier(*command[:-1], other, "--steps", 2, "--out", run, "--resume", check=False)
    assert failed.returncode == 1 and "is not used: it was computed with other weights" in failed.stderr
    assert "the data's ref_logprobs are not those that the run was trained on" in failed.stderr
    assert file.read_bytes() == kept
    file.unlink()
    failed = espalier(*command[:-1], other, "--steps", 2, "--out", run, "--resume", check=False)
    assert failed.returncode == 1 and "the data's ref_logprobs are not those" in failed.stderr and not file.exists()
    file.write_bytes(kept)
    failed = espalier(*command[:-1], other, "--steps", 2, "--out", run, check=False)
    assert failed.returncode == 1 and "holds a run already" in failed.stderr and "reference:" not in failed.stderr
    assert file.read_bytes() == kept
    espalier(*command, "--steps", 2, "--out", run, "--resume")


def test_what_another_run_keeps_is_not_touched(espalier, command, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "ref_logprobs.safetensors").write_text("kept")
    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("process 1 on elsewhere\n")
        lock.flush()
        failed = espalier(*command, "--steps", 1, "--out", run, check=False)
    assert failed.returncode == 1 and "process 1 on elsewhere is writing to this folder" in failed.stderr
    assert (run / "ref_logprobs.safetensors").read_text() == "kept"


def test_what_does_not_fit_is_refused_before_anything_is_computed(espalier, command, model, data, teacher, tmp_path):
    def refused(*words, flags=(), start=command):
        failed = espalier(*start, *flags, "--out", tmp_path / "run", check=False)
        assert failed.returncode == 1, failed.stderr
        assert all(word in failed.stderr.strip().splitlines()[-1] for word in words), failed.stderr
        assert not (tmp_path / "run").exists()

    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text(json.dumps({**MODELS["llama"], "vocab_size": 60}))
    espalier("init", "--config", small / "config.json", "--out", small / "model")
    refused("expected the vocab_size of the model, 61, received 60", start=[*command[:-1], small / "model"])
    refused("none", start=[*command[:-1], tmp_path / "none"])
    sft = [flag if flag != "dpo" else "sft" for flag in command]
    refused("reference-model: expected an objective that reads ref_logprobs", "received sft", start=sft)
    grpo = [flag if flag != "dpo" else "grpo" for flag in command]
    refused("reference-model: expected an objective that reads ref_logprobs", "kl-coef above 0", start=grpo)
    opd = [flag if flag != "dpo" else "opd" for flag in command]
    refused("reference-model: expected an objective that reads ref_logprobs", "received opd with ref-topk rest",
            start=opd, flags=["--ref-topk", "rest"])  # fmt: skip
    rows = with_reference(espalier, teacher, data, tmp_path / "rows.jsonl")
    has = [rows if flag == data else flag for flag in command]
    refused("rows.jsonl: trajectory 0 (row 0) has `ref_logprobs` already", start=has)
    bare = write_rows(tmp_path / "bare.jsonl", [{"input_ids": [1, 2, 3]}])
    refused("pair_id", start=[bare if flag == data else flag for flag in command])


def test_a_dry_run_computes_nothing(espalier, command, data, tmp_path):
    shown = espalier(*command, "--eval-data", data, "--steps", 1, "--out", tmp_path / "run", "--dry-run")
    assert "reference-model" in shown.stdout and "reference:" not in shown.stderr and not (tmp_path / "run").exists()
