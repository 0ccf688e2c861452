"""What a user of bin/espalier sees: runs, files, errors."""

import json
import re
import subprocess
import sys

import pytest
from safetensors.torch import load_file
from test_against_transformers import MODELS, random_rows, write_rows

from conftest import REPOSITORY


@pytest.fixture(scope="module")
def model(tmp_path_factory, espalier):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODELS["qwen3"]))
    espalier("init", "--config", folder / "config.json", "--out", folder / "model", "--seed", 5)
    return folder / "model"


@pytest.fixture
def data(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", random_rows(7, "grpo"))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(run, step):
    return load_file(run / f"checkpoints/step_{step}/model.safetensors")


def test_every_command_explains_itself(espalier):
    for command in ["prepare", "inspect", "plan", "train", "logprobs", "verify", "bench", "synth", "init"]:
        assert "--" in espalier(command, "--help").stdout, command


def test_a_run_leaves_metrics_events_config_and_a_checkpoint(espalier, model, data, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    espalier("train", "--model", model, "--data", data, "--out", tmp_path / "run", "--steps", 3)
    metrics = lines(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert {"loss", "grad_norm", "learning_rate", "tree_tokens_per_second", "flat_tokens_per_second"} <= set(metrics[0])
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]
    assert events.Scalars("train/loss")[2].value == pytest.approx(metrics[2]["loss"], rel=1e-6)
    assert "steps = 3" in (tmp_path / "run/config.toml").read_text()
    assert (tmp_path / "run/checkpoints/step_3/config.json").exists()


def test_resume_continues_bit_for_bit(espalier, model, data, tmp_path):
    flags = ["--model", model, "--data", data, "--objective", "grpo", "--batch-size", 4, "--shuffle", "rows",
             "--seed", 9, "--learning-rate", 1e-3, "--dtype", "bfloat16", "--token-budget", 30]  # fmt: skip
    espalier("train", *flags, "--out", tmp_path / "whole", "--steps", 6)
    espalier("train", *flags, "--out", tmp_path / "parts", "--steps", 4, "--save-every", 2)
    espalier("train", *flags, "--out", tmp_path / "parts", "--steps", 6, "--resume")
    whole, parts = weights(tmp_path / "whole", 6), weights(tmp_path / "parts", 6)
    assert all(whole[name].equal(parts[name]) for name in whole)
    losses = lambda run: [line["loss"] for line in lines(tmp_path / run / "metrics.jsonl")]
    assert losses("whole") == losses("parts") and len(losses("whole")) == 6
    # Control: another seed gives other weights.
    espalier("train", *flags[:-4], "--dtype", "bfloat16", "--seed", 10, "--out", tmp_path / "other", "--steps", 6)
    other = weights(tmp_path / "other", 6)
    assert not all(whole[name].equal(other[name]) for name in whole)


def test_a_run_is_never_overwritten(espalier, model, data, tmp_path):
    command = ["train", "--model", model, "--data", data, "--out", tmp_path / "run", "--steps", 1]
    espalier(*command)
    again = espalier(*command, check=False)
    assert again.returncode == 1 and "--resume" in again.stderr


def test_one_row_at_a_time_equals_all_at_once(espalier, model, data, tmp_path):
    """Accumulation: micro-batches of one trajectory give the gradient of one micro-batch of all."""
    flags = ["--model", model, "--data", data, "--dtype", "float64", "--optimizer", "sgd", "--learning-rate", 1,
             "--max-grad-norm", 0, "--steps", 1]  # fmt: skip
    espalier("train", *flags, "--out", tmp_path / "one", "--strategy", "sequence-packing", "--token-budget", 18)
    espalier("train", *flags, "--out", tmp_path / "all", "--token-budget", 1000)
    one, everything = weights(tmp_path / "one", 1), weights(tmp_path / "all", 1)
    for name in one:
        assert (one[name] - everything[name]).norm() <= 1e-12 * everything[name].norm(), name


def test_flags_win_over_the_config_file_and_unknown_keys_fail(espalier, model, data, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(f'model = "{model}"\nsteps = 2\nlearning-rate = 0.25\n')
    espalier("train", "--config", config, "--data", data, "--out", tmp_path / "run", "--learning-rate", 0.125)
    assert lines(tmp_path / "run/metrics.jsonl")[1]["learning_rate"] == 0.125
    config.write_text("steps = 2\nlearning-rat = 1\n")
    failed = espalier("train", "--config", config, "--data", data, "--out", tmp_path / "other", check=False)
    assert failed.returncode == 1 and f"{config}:2" in failed.stderr and "learning-rat" in failed.stderr
    assert len(failed.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("line, words", [
    ('{"input_ids": [1, 2, 61]}', ["input_ids", "61"]),
    ('{"input_ids": [1, 2.5]}', ["input_ids", "2.5"]),
    ('{"input_ids": []}', ["input_ids"]),
    ('{"loss_mask": [1]}', ["input_ids"]),
    ('{"input_ids": [1, 2], "loss_mask": [1]}', ["loss_mask"]),
    ('{"input_ids": [1, 2], "logprobs": [null, NaN]}', ["logprobs", "NaN"]),
    ('{"input_ids": [1, 2', []),
])  # fmt: skip
def test_bad_rows(espalier, model, tmp_path, line, words):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"input_ids": [1, 2, 3]}\n' + line + "\n")
    failed = espalier("verify", "--model", model, "--data", data, check=False)
    assert failed.returncode == 1 and f"{data}:2" in failed.stderr
    assert len(failed.stderr.strip().splitlines()) == 1
    assert all(word in failed.stderr for word in words), failed.stderr
    skipped = espalier("verify", "--model", model, "--data", data, "--skip-bad-rows", "--json")
    assert json.loads(skipped.stdout)["flat_tokens"] == 3 and "skipped 1 bad row" in skipped.stderr


def test_nothing_replaces_an_output_when_a_command_fails(espalier, model, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("precious")
    data = tmp_path / "rows.jsonl"
    data.write_text("not json\n")
    assert espalier("logprobs", "--model", model, "--data", data, "-o", out, check=False).returncode == 1
    assert out.read_text() == "precious"


def test_devices_that_are_not_there(espalier, model, data, tmp_path):
    """One line and status 1 for a GPU that is not there; a word that is no device is wrong usage."""
    commands = {"train": ["--out", tmp_path / "run"], "verify": [], "logprobs": ["-o", tmp_path / "out.jsonl"],
                "bench": [], "plan": []}  # fmt: skip
    for command, more in commands.items():
        flags = [command, "--model", model, "--data", data, *more]
        wrong = espalier(*flags, "--device", "tpu", check=False)
        assert wrong.returncode == 2 and "expected cpu, cuda or cuda:N, received `tpu`" in wrong.stderr
        # More than any machine has, so that this holds on one with GPUs too.
        absent = espalier(*flags, "--device", "cuda:100", check=False)
        assert absent.returncode == 1 and absent.stdout == "" and len(absent.stderr.splitlines()) == 1, absent.stderr
        reasons = ("no CUDA device is visible", "there is no", "expected an index from 0 to")
        assert any(reason in absent.stderr for reason in reasons), absent.stderr
    assert not (tmp_path / "run").exists() and not (tmp_path / "out.jsonl").exists()


def test_dry_run_writes_nothing(espalier, model, data, tmp_path):
    shown = espalier("train", "--model", model, "--data", data, "--out", tmp_path / "run", "--dry-run").stdout
    assert "predicted memory" in shown and "predicted speed-up" in shown and 'strategy = "auto"' in shown
    assert not (tmp_path / "run").exists()


def test_synth_inspect_and_plan_agree(espalier, tmp_path):
    rows = tmp_path / "rows.safetensors"
    espalier("synth", "-o", rows, "--depth", 3, "--branching", 4, "--target-por", 0.7, "--seed", 3)
    seen = json.loads(espalier("inspect", "--data", rows, "--json").stdout)
    assert seen["por"] == pytest.approx(0.7, abs=0.02)
    plan = json.loads(espalier("plan", "--data", rows, "--token-budget", 100000, "--json").stdout)
    assert plan["encoded_tokens"] == seen["tree_tokens"] and plan["flat_tokens"] == seen["flat_tokens"]
    packing = json.loads(espalier("plan", "--data", rows, "--strategy", "sequence-packing", "--json").stdout)
    assert packing["encoded_tokens"] == seen["flat_tokens"] and packing["effective_reuse_ratio"] == 0


def test_budgets_that_are_too_small_name_the_smallest(espalier, model, data, tmp_path):
    flags = ["plan", "--data", data]
    packing = espalier(*flags, "--strategy", "tree-packing", "--token-budget", 2, check=False)
    assert packing.returncode == 1 and "expected a budget of at least" in packing.stderr
    flags += ["--model", model, "--optimizer", "sgd"]
    smallest = {}
    for checkpoint in ("none", "layer", "piece", "auto"):
        way = [*flags, "--checkpoint-activations", checkpoint]
        short = espalier(*way, "--memory-budget", "1kB", check=False)
        assert short.returncode == 1 and ("layer or piece needs less" in short.stderr) == (checkpoint == "none")
        smallest[checkpoint] = re.search(r"the smallest plan found needs (\d+)", short.stderr).group(1)
        plan = json.loads(espalier(*way, "--memory-budget", smallest[checkpoint], "--json").stdout)
        assert plan["predicted_peak_bytes"] <= int(smallest[checkpoint])
        assert plan["encoded_tokens"] == plan["tree_tokens"] if plan["strategy"] == "partition" else True
        assert plan["checkpoint_activations"] in ("none", "layer", "piece")
    assert int(smallest["auto"]) == min(int(each) for each in smallest.values())
    without_model = espalier("plan", "--data", data, "--memory-budget", "1GB", check=False)
    assert without_model.returncode == 1 and "--model" in without_model.stderr


def test_pieces_of_a_tree_train_alike(espalier, model, data, tmp_path):
    """Whole, in pieces, and with activations computed again: the same weights after a step in float64."""
    flags = ["--model", model, "--data", data, "--steps", 1, "--dtype", "float64", "--optimizer", "sgd",
             "--learning-rate", 0.1, "--no-calibration"]  # fmt: skip
    ways = {"whole": [], "pieces": ["--token-budget", 5], "layer": ["--token-budget", 5, "--checkpoint-activations", "layer"],
            "host": ["--token-budget", 5, "--checkpoint-activations", "piece", "--offload-context"]}  # fmt: skip
    losses = {}
    for way, more in ways.items():
        out = tmp_path / way
        espalier("train", *flags, "--out", out, "--strategy", "partition", *more)
        losses[way] = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    whole = losses["whole"]
    assert whole["micro_batches"] == 1 and losses["pieces"]["micro_batches"] > 2
    for way in ways:
        assert losses[way]["encoded_tokens"] <= whole["encoded_tokens"]
        assert losses[way]["loss"] == pytest.approx(whole["loss"], rel=1e-12)
        assert losses[way]["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-12)
    assert losses["layer"]["recomputed_tokens"] > losses["host"]["recomputed_tokens"] > 0


def test_a_calibration_is_measured_once(espalier, model, data):
    # A number of threads that no machine has as its default: other tests calibrate with that one.
    first = espalier("plan", "--model", model, "--data", data, "--json", "--threads", 5)
    again = espalier("plan", "--model", model, "--data", data, "--json", "--threads", 5)
    assert "measuring how fast" in first.stderr and "measuring how fast" not in again.stderr
    predicted = [json.loads(done.stdout)["predicted_seconds"] for done in (first, again)]
    assert predicted[0] == predicted[1] > 0


def test_a_calibration_that_does_not_hold_is_measured_again(espalier, model, data, tmp_path):
    flags = ["--model", model, "--data", data, "--threads", 1]
    espalier("plan", *flags, cache=tmp_path)
    (kept,) = (tmp_path / "espalier").glob("calibration-*.json")
    calibration = json.loads(kept.read_text())
    train = ["train", *flags, "--steps", 2, "--learning-rate", 0.001]
    for factor, again in ((1e5, True), (1, False)):  # as of a busy machine; as measured: steps too short to be judged
        scaled = {**calibration, "seconds": [seconds * factor for seconds in calibration["seconds"]]}
        kept.write_text(json.dumps(scaled))
        done = espalier(*train, "--out", tmp_path / f"run_{again}", cache=tmp_path)
        assert "measuring how fast" not in done.stderr
        assert ("measured again by the next run" in done.stderr) == again and kept.exists() != again


def test_verify_reports_by_its_exit_status(espalier, model, tmp_path):
    # The ratio of two rounding errors needs some hundred tokens to settle.
    data = tmp_path / "rows.jsonl"
    espalier("synth", "-o", data, "--trees", 2, "--node-length", 30, "--vocab-size", 61, "--loss-rate", 0.5)
    for dtype in ["float64", "float32"]:
        report = json.loads(espalier("verify", "--model", model, "--data", data, "--dtype", dtype, "--json").stdout)
        assert report["passed"] and report["isolation_bitwise"] and ("error_ratio_max" in report) == (dtype != "float64")


def test_bench_of_the_tree_alone(espalier, model, data, tmp_path):
    flags = ["bench", "--model", model, "--data", data, "--repeats", 1, "--warmup", 0]
    both = json.loads(espalier(*flags, "--json").stdout)["rows"][0]
    alone = json.loads(espalier(*flags, "--tree-only", "--json", "-o", tmp_path / "table.md").stdout)["rows"][0]
    assert {"tree_seconds", "bound", "loss", "grad_norm"} <= set(alone) and "packing_seconds" not in alone
    for key in ("flat_tokens", "tree_tokens", "bound", "loss", "grad_norm"):
        assert alone[key] == both[key], key
    verified = json.loads(espalier("verify", "--model", model, "--data", data, "--json").stdout)
    assert alone["loss"] == pytest.approx(verified["loss"], rel=1e-5)
    table = (tmp_path / "table.md").read_text()
    assert "| loss |" in table and f"{alone['loss']:.6f}" in table and "packing" not in table
    # In pieces: the same loss and gradients, and no token twice.
    pieces = espalier(*flags, "--tree-only", "--strategy", "partition", "--token-budget", 5, "--json").stdout
    pieces = json.loads(pieces)["rows"][0]
    assert pieces["micro_batches"] > alone["micro_batches"] == 1
    assert pieces["encoded_tokens"] <= alone["encoded_tokens"]
    assert pieces["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert pieces["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
    for excluded in (["--tree-only"], ["--strategy", "partition"]):
        assert espalier(*flags, "--strategies", *excluded, check=False).returncode == 2


def test_the_ops_are_the_same_from_python():
    """torch.ops.espalier runs what the engine runs; a star of one prompt and two responses, against a dense mask."""
    script = """
import torch
torch.ops.load_library("build/release/src/espalier/ops/libespalier_ops.so")
torch.manual_seed(0)
q, k, v = (torch.randn(7, h, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
ends = torch.tensor([7, 7, 7, 5, 5, 7, 7], dtype=torch.int32)
i, j = torch.arange(7), torch.arange(7)[:, None]
mask = (i <= j) & (j < ends[None, :])
out, _ = torch.ops.espalier.tree_attention(q, k, v, ends, 0.3, [], [], torch.empty(0, 5, dtype=torch.int64))
dense = torch.nn.functional.scaled_dot_product_attention(
    *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=mask, scale=0.3, enable_gqa=True).transpose(0, 1)
assert (out - dense).abs().max() < 1e-12
seed = torch.randn_like(out)
for ours, theirs in zip(torch.autograd.grad(out, (q, k, v), seed), torch.autograd.grad(dense, (q, k, v), seed)):
    assert (ours - theirs).abs().max() < 1e-12
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=REPOSITORY)
