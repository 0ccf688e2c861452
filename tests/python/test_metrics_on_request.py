# SPDX-License-Identifier: Apache-2.0
"""train --log-grad-norms and --log-entropy: what they report, and that they change nothing else."""

import json
import math

import pytest
from safetensors.torch import load_file

import transformers_reference as reference
from small_models import MODELS, random_rows, write_rows
from test_mix import write_mix
from test_objectives import model_folder  # noqa: F401

LOG = ("--log-grad-norms", "--log-entropy")
MEASURED = ("seconds", "_per_second", "predicted", "bytes")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", random_rows(6, "grpo"))


def run(espalier, out, *flags):
    espalier("train", "--out", out, "--learning-rate", 0.01, "--max-grad-norm", 0.1, "--no-calibration", *flags)
    return reference.read_rows(out / "metrics.jsonl")


def is_kept(name):
    return not any(part in name for part in MEASURED)


@pytest.mark.parametrize("objective", ["sft", "grpo", "gspo"])
@pytest.mark.parametrize("strategy", ["tree-packing", "partition", "sequence-packing"])
def test_the_run_is_the_same(espalier, model, data, tmp_path, objective, strategy):
    flags = ["--model", model, "--data", data, "--objective", objective, "--steps", 3, "--batch-size", 5,
             "--strategy", strategy, "--token-budget", 64]  # fmt: skip
    without, logged = run(espalier, tmp_path / "without", *flags), run(espalier, tmp_path / "with", *flags, *LOG)
    for one, other in zip(without, logged, strict=True):
        assert "entropy" not in one and not any(name.startswith("grad_norm/") for name in one)
        assert {name: value for name, value in one.items() if is_kept(name)} == {
            name: value for name, value in other.items() if is_kept(name) and name in one}  # fmt: skip
        kinds = {name: value for name, value in other.items() if name.startswith("grad_norm/")}
        assert {name.removeprefix("grad_norm/") for name in kinds} == {"embed_tokens", "norm", "self_attn", "mlp", "lm_head"}
        assert math.hypot(*kinds.values()) == pytest.approx(other["grad_norm"], rel=1e-12)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "with/checkpoints/step_3" / name).read_bytes() == \
            (tmp_path / "without/checkpoints/step_3" / name).read_bytes()  # fmt: skip


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_the_entropy_is_that_of_the_distributions(espalier, model, data, tmp_path, monkeypatch, dtype):
    """The mean over the terms, against `logprobs --entropies`; with the bonus it is the same metric. Both take their logits
    from sums in float32: products of LibTorch would round them to bfloat16, each in its own blocks."""
    monkeypatch.setenv("ESPALIER_BF16_PRODUCTS", "upcast")
    flags = ["--model", model, "--data", data, "--objective", "grpo", "--dtype", dtype, "--steps", 1]
    logged = run(espalier, tmp_path / "logged", *flags, "--log-entropy")[0]
    espalier("logprobs", "--model", model, "--data", data, "--entropies", "--dtype", dtype, "-o", tmp_path / "listing.jsonl")
    entropies = []
    for row, line in zip(reference.read_rows(data), reference.read_rows(tmp_path / "listing.jsonl"), strict=True):
        weights = row.get("loss_weights", row.get("loss_mask", [1] * len(row["input_ids"])))
        entropies += [value for value, weight in zip(line["entropies"][1:], weights[1:]) if weight]
    rel = 1e-12 if dtype == "float64" else 1e-5
    assert logged["entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=rel)
    bonus = run(espalier, tmp_path / "bonus", *flags, "--entropy-coef", 0.01)[0]
    assert bonus["entropy"] == pytest.approx(logged["entropy"], rel=rel) and bonus["loss"] != logged["loss"]


def test_in_a_mix_each_source_is_asked_by_itself(espalier, model_folder, tmp_path):
    mix = write_mix(tmp_path / "data", ("grpo", "chats", "teacher"), grpo={"log_entropy": True}, teacher={"log-entropy": True})
    logged = run(espalier, tmp_path / "run", "--model", model_folder, "--mix", mix, "--steps", 1)[0]
    assert {name for name in logged if name.startswith("entropy")} == {"entropy/grpo", "entropy/teacher"}
    assert 0 < logged["entropy/grpo"] < math.log(61)
    quiet = run(espalier, tmp_path / "quiet", "--model", model_folder, "--mix",
                write_mix(tmp_path / "plain", ("grpo", "chats", "teacher")), "--steps", 1)  # fmt: skip
    one, other = (load_file(tmp_path / each / "checkpoints/step_1/model.safetensors") for each in ("run", "quiet"))
    assert all(one[name].equal(other[name]) for name in one) and quiet[0]["loss"] == logged["loss"]


@pytest.mark.parametrize("family,kinds", [("qwen3_moe", {"experts", "router"}), ("qwen3_5", {"linear_attn"}),
                                          ("granitemoehybrid", {"mamba", "shared_mlp"})])  # fmt: skip
def test_kinds_of_other_families(espalier, tmp_path, data, family, kinds):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[family]))
    espalier("init", "--config", tmp_path / "config.json", "--out", tmp_path / "model")
    logged = run(espalier, tmp_path / "run", "--model", tmp_path / "model", "--data", data, "--steps", 1, "--log-grad-norms")[0]
    assert kinds <= {name.removeprefix("grad_norm/") for name in logged if name.startswith("grad_norm/")}
