# SPDX-License-Identifier: Apache-2.0
"""`espalier train` on several processes over Gloo, against one process; and what ends a run on all of them."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from conftest import REPOSITORY
from engines import init_model
from small_models import random_rows, write_rows
from train_ranks import outcomes

pytest.importorskip("torch.distributed")

STEPS = 4
FLAGS = ["--objective", "grpo", "--dtype", "float64", "--batch-size", "4", "--shuffle", "groups", "--learning-rate", "0.01",
         "--token-budget", "24", "--no-calibration", "--save-every", "2"]  # fmt: skip


def flags(model, rows, out, *more):
    """`rows`: a file, or the folder that a run follows."""
    source = "--follow" if rows.is_dir() else "--data"
    return ["--model", str(model), source, str(rows), "--out", str(out), *FLAGS, *map(str, more)]


VERIFIED = ["--objective", "grpo", "--strategy", "partition", "--json"]


def commands(name, model, rows, *more):
    return [name, "--model", str(model), "--data", str(rows), "--dtype", "float64", "--token-budget", "24", *map(str, more)]


def rows_with_loss(seed):
    """Each row has a token with loss, so that it can be a step by itself."""
    rows = [row for row in random_rows(seed, "grpo") if len(row["input_ids"]) > 1]
    return [{key: value for key, value in row.items() if key not in ("loss_mask", "loss_weights")} for row in rows]


def records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run, step=STEPS):
    """Of one process or of several."""
    return {name: value for file in (run / f"checkpoints/step_{step}").glob("model*.safetensors") for name, value in load_file(file).items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("train-ranks")


@pytest.fixture(scope="module")
def inputs(folder, espalier):
    """Model, rows, held-out rows."""
    model = init_model(espalier, folder / "init", "qwen3_moe")
    rows = write_rows(folder / "rows.jsonl", rows_with_loss(7))
    held_out = write_rows(folder / "held_out.jsonl", random_rows(8, "grpo"))
    return model, rows, held_out


@pytest.fixture(scope="module")
def one(folder, inputs, espalier):
    """The run of one process."""
    model, rows, held_out = inputs
    espalier("train", *flags(model, rows, folder / "one", "--steps", STEPS, "--eval-data", held_out, "--eval-every", 2))
    return folder / "one"


@pytest.fixture(scope="module")
def followed(folder):
    """A folder with all the rows that a run will get, and one to which more may come."""
    for name in ("followed", "more"):
        (folder / name).mkdir()
        for file in range(2):
            write_rows(folder / name / f"{file}.jsonl", rows_with_loss(7 + file))
    (folder / "followed/stop").touch()
    return folder / "followed", folder / "more"


@pytest.fixture(scope="module")
def teacher(folder, espalier):
    return init_model(espalier, folder / "teacher", "llama")


@pytest.fixture(scope="module")
def found(folder, inputs, followed, teacher):
    model, rows, held_out = inputs
    evaluates = ["--eval-data", held_out, "--eval-every", 2]
    job = lambda name, ranks, out, *more, **other: {
        "name": name, "arguments": [["train", *flags(model, rows, folder / out, *more)]] * ranks, **other}
    long = ["--steps", 1_000_000]
    together = ["--strategy", "partition", "--context-parallel", 2]
    teaches = ["--reference-model", teacher, "--kl-coef", 0.1]
    divided = lambda name, ranks, *more: {"name": name, "arguments": [commands(name, model, rows, *more)] * ranks}
    of_each = lambda out, files: [["train", *flags(model, file, folder / out, *long)] for file in files]
    bad = write_rows(folder / "bad.jsonl", [*rows_with_loss(7), {"input_ids": [1, 2, 1000], "advantage": 1.0}])
    other = write_rows(folder / "other.jsonl", rows_with_loss(9))
    jobs = [
        job("two", 2, "two", "--steps", STEPS, *evaluates),
        job("again", 2, "again", "--steps", STEPS, *evaluates),
        job("four", 4, "four", "--steps", STEPS, *evaluates),
        job("together", 2, "together", "--steps", STEPS, *together, *evaluates),
        job("in pairs", 4, "in pairs", "--steps", STEPS, *together, *evaluates),
        job("killed together", 2, "killed together", *long, *together, signal=[1, int(signal.SIGKILL), "step 3/"]),
        job("three together", 3, "three together", "--steps", STEPS, *together),
        {"name": "repeated together", "arguments": [["rerun", str(folder / "together"), "--out", str(folder / "repeated together")]] * 2},
        job("begun", 2, "resumed", "--steps", 2, *evaluates),
        job("resumed", 3, "resumed", "--steps", STEPS, "--resume", *evaluates),
        *(job(f"turn {turn}", ranks, "turns", "--steps", turn, "--resume") for turn, ranks in enumerate((1, 3, 2, 1), 1)),
        job("background", 2, "background", "--steps", STEPS, "--save-in-background", "--profile", folder / "trace.json", *evaluates),
        job("stopped", 2, "stopped", *long, signal=[1, int(signal.SIGTERM), "step 3/"]),
        job("killed", 2, "killed", *long, signal=[1, int(signal.SIGKILL), "step 3/"]),
        job("reference", 2, "reference", "--steps", 2, *teaches),
        job("reference, resumed", 3, "reference", "--steps", STEPS, "--resume", *teaches),
        divided("logprobs", 2, "--top-k", 3, "--entropies", "-o", folder / "logprobs of 2.jsonl"),
        divided("sample", 3, "--samples", 2, "--max-new-tokens", 6, "-o", folder / "sampled by 3.jsonl"),
        divided("verify", 2, *VERIFIED),
        {"name": "bad row", "arguments": of_each("bad", (rows, bad))},
        {"name": "other rows", "arguments": of_each("others", (rows, rows, other))},
        {"name": "follows", "arguments": [["train", *flags(model, followed[0], folder / "follows", *long)]] * 2},
        {"name": "waits", "arguments": [["train", *flags(model, followed[1], folder / "waits", *long)]] * 2,
         "signal": [1, int(signal.SIGTERM), "waiting for rows"]},
        {"name": "rerun by three", "arguments": [["rerun", str(folder / "two"), "--out", str(folder / "rerun")]] * 3},
    ]  # fmt: skip
    return outcomes(folder, jobs)


@pytest.mark.parametrize("name", ["two", "four", "resumed", "together", "in pairs"])
def test_any_number_of_ranks_gives_the_run_of_one_process(found, folder, one, name):
    statuses, outputs = found[name]
    assert set(statuses) == {0}, outputs
    assert "step 4/4" in outputs[0]
    assert not any("step 4/4" in output for output in outputs[1:])  # one tells of it
    ours, theirs = records(folder / name), records(one)
    assert [record.keys() for record in ours] == [record.keys() for record in theirs]
    measured = ("second", "bytes", "micro_batches", "encoded_tokens", "tree_tokens_per")
    for mine, its in zip(ours, theirs):
        for key, value in its.items():
            if not any(part in key for part in measured):
                assert mine[key] == pytest.approx(value, rel=1e-12, abs=1e-12), key
    expected = weights(one)
    for key, value in weights(folder / name).items():
        assert np.abs(value - expected[key]).max() < 1e-12, key


def test_all_ranks_take_the_same_files_as_they_come(found, folder, inputs, followed, espalier):
    model = inputs[0]
    espalier("train", *flags(model, followed[0], folder / "follows-alone", "--steps", 1_000_000))
    statuses, outputs = found["follows"]
    assert statuses == [0, 0], outputs
    ours, alone = records(folder / "follows"), records(folder / "follows-alone")
    assert [record["loss"] for record in ours] == pytest.approx([record["loss"] for record in alone], rel=1e-11)
    last = alone[-1]["step"]
    expected = weights(folder / "follows-alone", last)
    for key, value in weights(folder / "follows", last).items():
        assert np.abs(value - expected[key]).max() < 1e-12, key


def test_ranks_that_wait_for_rows_are_stopped_together(found, folder):
    statuses, outputs = found["waits"]
    assert statuses == [3, 3], outputs
    assert outputs[0].count("waiting for rows") == 1 and "waiting" not in outputs[1]
    assert len(list((folder / "waits/checkpoints").glob("step_*"))) > 0


def test_equal_numbers_of_ranks_give_equal_bits(found, folder):
    assert found["again"][0] == found["background"][0] == [0, 0]
    digest = lambda run, file: hashlib.sha256((folder / run / f"checkpoints/step_{STEPS}" / file).read_bytes()).hexdigest()
    files = [file.name for file in (folder / f"two/checkpoints/step_{STEPS}").glob("*.safetensors")]
    assert sorted(files) == [f"{kind}-0000{rank}-of-00002.safetensors" for kind in ("model", "optimizer") for rank in (1, 2)]
    for file in (*files, "model.safetensors.index.json", "manifest.json"):
        assert digest("two", file) == digest("again", file) == digest("background", file)


def test_transformers_opens_what_two_ranks_have_written(found, folder, one):
    transformers = pytest.importorskip("transformers")
    step = folder / f"two/checkpoints/step_{STEPS}"
    assert set(json.loads((step / "model.safetensors.index.json").read_text())["weight_map"]) == set(weights(one))
    load = lambda run: transformers.AutoModelForCausalLM.from_pretrained(run / f"checkpoints/step_{STEPS}", dtype="float64", output_loading_info=True)
    (ours, told), (theirs, _) = load(folder / "two"), load(one)
    assert not any(told.values()), told
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, value in ours.state_dict().items():
        assert (value - expected[name]).abs().max() < 1e-12, name


def test_one_rank_and_three_and_two_and_one_continue(found, folder, one):
    assert [found[f"turn {turn}"][0] for turn in (1, 2, 3, 4)] == [[0], [0, 0, 0], [0, 0], [0]], found
    expected = weights(one)
    for key, value in weights(folder / "turns").items():
        assert np.abs(value - expected[key]).max() < 1e-12, key


def test_a_signal_to_one_rank_stops_all_after_saving(found, folder):
    statuses, outputs = found["stopped"]
    assert statuses == [3, 3], outputs
    assert "stopped by a signal after saving" in outputs[0]
    assert list((folder / "stopped/checkpoints").glob("step_*"))


def test_a_lost_rank_ends_all_and_leaves_the_newest_checkpoint(found, folder):
    statuses, outputs = found["killed"]
    assert statuses == [1, -signal.SIGKILL]
    assert "a rank is lost" in outputs[0] and "continue with --resume" in outputs[0], outputs
    assert list((folder / "killed/checkpoints").glob("step_*"))


def test_ranks_that_compute_micro_batches_together(found, folder):
    """Repeated they give the same bits; one that is lost, while another waits for its keys, ends all."""
    assert found["repeated together"][0] == [0, 0], found["repeated together"]
    for file in (folder / f"together/checkpoints/step_{STEPS}").glob("*.safetensors"):
        assert file.read_bytes() == (folder / f"repeated together/checkpoints/step_{STEPS}" / file.name).read_bytes()
    assert "context-parallel = 2" in (folder / "together/config.toml").read_text()
    statuses, outputs = found["killed together"]
    assert statuses == [1, -signal.SIGKILL]
    assert "a rank is lost" in outputs[0] and "continue with --resume" in outputs[0], outputs
    statuses, outputs = found["three together"]
    assert statuses == [1, 1, 1]
    for output in outputs:
        assert "expected a divisor of the number of processes, received 3 of them" in output, outputs


def test_models_with_recurrent_layers_are_not_divided(espalier, folder):
    model = init_model(espalier, folder / "recurrent", "qwen3_next")
    failed = espalier("train", *flags(model, write_rows(folder / "few.jsonl", rows_with_loss(7)), folder / "refused", "--dry-run",
                                      "--context-parallel", 2), check=False)  # fmt: skip
    assert failed.returncode == 1 and "expected a model whose layers are attention, received one with recurrent layers" in failed.stderr


def test_the_message_of_the_first_rank_that_fails_is_on_every_rank(found):
    statuses, outputs = found["bad row"]
    assert statuses == [1, 1]
    for output in outputs:
        assert "rank 1: InputError" in output and "received 1000" in output, outputs


def test_ranks_with_other_rows_are_found(found):
    statuses, outputs = found["other rows"]
    assert statuses == [1, 1, 1]
    for output in outputs:
        assert "the settings and data of the run: expected the same on all ranks" in output, outputs


def test_a_reference_is_divided(found, folder, inputs, teacher, espalier):
    """By other numbers of ranks to the same bits, which a resumed run needs."""
    assert found["reference"][0] == [0, 0] and found["reference, resumed"][0] == [0, 0, 0], found
    model, rows, _ = inputs
    espalier("train", *flags(model, rows, folder / "reference of one", "--steps", STEPS, "--reference-model", teacher,
                             "--kl-coef", 0.1))  # fmt: skip
    read = lambda run: (folder / run / "ref_logprobs.safetensors").read_bytes()
    assert read("reference") == read("reference of one")
    expected = weights(folder / "reference of one")
    for key, value in weights(folder / "reference").items():
        assert np.abs(value - expected[key]).max() < 1e-12, key
    assert "computed, stored in" in found["reference"][1][0] and "from" in found["reference, resumed"][1][0]


def test_commands_are_divided(found, folder, inputs, espalier):
    model, rows, _ = inputs
    for name in ("logprobs", "sample", "verify"):
        statuses, outputs = found[name]
        assert set(statuses) == {0}, outputs
        assert outputs[0] and not any("prompts" in output or "encoded" in output for output in outputs[1:])
    for name, file, *more in (("logprobs", "logprobs of 2.jsonl", "--top-k", 3, "--entropies"),
                              ("sample", "sampled by 3.jsonl", "--samples", 2, "--max-new-tokens", 6)):
        espalier(*commands(name, model, rows, *more, "-o", folder / "of one.jsonl"))
        ours, theirs = ([json.loads(line) for line in path.read_text().splitlines()] for path in (folder / file, folder / "of one.jsonl"))
        if name == "logprobs":
            assert ours == theirs and ours[0]["topk_ids"]
        for mine, its in zip(ours, theirs, strict=True):
            assert mine.get("input_ids") == its.get("input_ids")
            assert mine["logprobs"][1:] == pytest.approx(its["logprobs"][1:], abs=1e-11)
    printed = found["verify"][1][0]
    report = json.loads(printed[printed.index("{\n"):])
    one = json.loads(espalier(*commands("verify", model, rows, *VERIFIED)).stdout)
    assert report["passed"] and report["tree_tokens"] == one["tree_tokens"] and report["loss"] == pytest.approx(one["loss"], rel=1e-12)
    assert report["encoded_tokens"] > one["encoded_tokens"]  # prefixes of divided trees


def test_texts_that_python_makes_are_made_for_ranks(found, folder):
    """Whose program is not that of the command."""
    profile = found["background"][1][0]
    assert "GEMM bound: " in profile and "\nexchange  " in profile and (folder / "trace.json").stat().st_size > 0
    rows = [json.loads(line) for line in (folder / "sampled by 3.jsonl").read_text().splitlines()]
    sampled = sum(sum(row["loss_mask"]) for row in rows)  # by all of them
    assert f"\nsampled tokens                         {sampled:,} in " in found["sample"][1][0]


def test_a_run_is_repeated_by_as_many_ranks_alone(found, folder):
    statuses, outputs = found["rerun by three"]
    assert statuses == [1, 1, 1]
    for output in outputs:
        assert "the run was made with --processes 2, this one has 3: expected as many" in output, outputs
    assert not (folder / "rerun/metrics.jsonl").exists()


def test_processes_are_those_of_torchrun(folder, inputs, one, espalier):
    model, rows, held_out = inputs
    variables = {"ESPALIER_PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    espalier("train", *flags(model, rows, folder / "torchrun", "--steps", STEPS, "--processes", 2, "--eval-data", held_out,
                             "--eval-every", 2), variables=variables)  # fmt: skip
    espalier("rerun", folder / "torchrun", "--out", folder / "repeated", variables=variables)
    saved = [f"checkpoints/step_4/{file.name}" for file in (folder / "torchrun/checkpoints/step_4").glob("*.safetensors")]
    assert len(saved) == 4
    for file in ("run.json", *saved):
        assert (folder / "torchrun" / file).read_bytes() == (folder / "repeated" / file).read_bytes(), file
    record = json.loads((folder / "torchrun/run.json").read_text())
    assert record["processes"] == 2 and record["program"][1].startswith("commit: ")
    expected = weights(one)
    for key, value in weights(folder / "torchrun").items():
        assert np.abs(value - expected[key]).max() < 1e-12, key
    assert "processes" not in (folder / "torchrun/config.toml").read_text()


def test_a_run_that_torchrun_starts_again_continues_by_itself(folder, inputs):
    """A rank is killed after the first checkpoint; the run ends with the weights of one that was never disturbed. Without restarts it
    would end with its failure: test_a_lost_rank_ends_all_and_leaves_the_newest_checkpoint."""
    model, rows, _ = inputs
    steps = 40

    def start(out, *restarts):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *restarts, "-m", "espalier",
                   "train", *flags(model, rows, folder / out, "--steps", steps)]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(REPOSITORY / "python")}
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)

    killed = start("restarted", "--max-restarts", "1")
    while not (folder / "restarted/checkpoints/step_2").exists() and killed.poll() is None:
        time.sleep(0.005)
    ranks = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
    assert len(ranks) >= 2, killed.communicate()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    _, said = killed.communicate()
    assert killed.returncode == 0, said
    assert re.search(r"resum|continu", said), said
    undisturbed = start("undisturbed")
    assert undisturbed.communicate() and undisturbed.returncode == 0
    expected = weights(folder / "undisturbed", steps)
    for name, value in weights(folder / "restarted", steps).items():
        assert (value == expected[name]).all(), name


def test_engines_on_ranks(inputs, tmp_path, monkeypatch):
    import rank_processes

    monkeypatch.setenv("ESPALIER_TEST_MODEL", str(inputs[0]))
    checks = {2: ("calls_are_those_of_one_process", "an_error_of_one_is_one_of_all", "a_failed_pass_of_one_is_one_of_all"),
              3: ("calls_are_those_of_one_process",)}  # fmt: skip
    found = rank_processes.outcomes("engine_rank_checks", tmp_path, checks)
    assert found == {(name, ranks): None for ranks, names in checks.items() for name in names}, found
