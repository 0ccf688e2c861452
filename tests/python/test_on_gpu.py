# SPDX-License-Identifier: Apache-2.0
"""Patched models and espalier.Engine on a GPU, against training on each row alone in float64 on the CPU. Skipped without a GPU."""

import json
import random

import pytest
import torch

import espalier
from conftest import seed_of
from engines import engine_of, init_model
from engines import worst_error as worst_of_engine
from espalier.error_ratio import MAX_RATIO, error_ratio
from espalier.hf import patch
from espalier.hf.float64 import InFloat64
from espalier.hf.plain_layers import by_torch
from espalier.kernels import attention, libraries
from hf_models import alone, branching_rows, make_model, padded, sums_of, worst_error
from small_models import MODELS, MORE_FAMILIES, WINDOWS_AND_ROPES
from small_models import random_rows as small_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

DEVICE = "cuda"
EXACT = 1e-10  # in float64, whose sums on a GPU have another order
KINDS = ["llama", "qwen3", "mistral", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3", "qwen3_5", "qwen3_next", "mamba2",
         "granitemoehybrid", "nemotron_h"]  # fmt: skip
# Heads of sizes that the kernels of GPUs serve; without experts, whose choice rounding may change.
WIDE = {"initializer_range": 0.06, "hidden_size": 256, "intermediate_size": 384, "vocab_size": 61}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
LINEAR = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
LOW = {
    "llama": WIDE | HEADS, "qwen3": WIDE | HEADS | {"head_dim": 128}, "mistral": WIDE | HEADS | {"sliding_window": 20},
    "gemma2": WIDE | HEADS, "qwen3_5": WIDE | HEADS | LINEAR,
    "mamba2": {"hidden_size": 128, "num_heads": 4, "head_dim": 64, "state_size": 64, "n_groups": 1},
    "granitemoehybrid-dense": WIDE | {"num_attention_heads": 4, "num_key_value_heads": 2, "mamba_d_head": 64, "mamba_d_state": 64},
}  # fmt: skip


def model_of(kind, monkeypatch, **changes):
    """In float64, with values of bfloat16."""
    every = MODELS | WINDOWS_AND_ROPES | MORE_FAMILIES
    monkeypatch.setitem(MODELS, kind, every[kind] | changes)
    with by_torch():  # which Transformers before 5.16 looks up here
        model = make_model(kind, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def long_rows(seed=5):
    """Nodes of a few hundred tokens that branch, end inside one another, and stand alone."""
    rng = random.Random(seed_of(seed))
    tokens = lambda n: [rng.randrange(61) for _ in range(n)]
    trunk = tokens(150)
    left, right = trunk + tokens(70), trunk + tokens(64)
    return [left + tokens(90), left + tokens(33), left, right + tokens(129), right + tokens(1), trunk, tokens(40)]


def on_gpu(batch):
    return {name: value.to(DEVICE) for name, value in batch.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_patched_models_in_float64(kind, monkeypatch):
    model, rows = model_of(kind, monkeypatch), branching_rows()
    expected = alone(model, rows)
    with InFloat64():
        loss, gradients = sums_of(patch(model.to(DEVICE)), [on_gpu(padded(rows))])
    ours = loss, {name: None if each is None else each.cpu() for name, each in gradients.items()}
    assert worst_error(ours, expected) <= EXACT


def error_of(found, exact):
    """Of a loss and of gradients relative to their sizes, the root of the mean square."""
    (loss, gradients), (right, expected) = found, exact
    errors = [(loss - right) / right]
    for name, each in expected.items():
        if each is not None:
            errors.append(((gradients[name].double().cpu() - each).norm() / each.norm()).item())
    return (sum(error**2 for error in errors) / len(errors)) ** 0.5


def each_alone(rows):
    return [on_gpu({"input_ids": torch.tensor([row]), "labels": torch.tensor([row])}) for row in rows]


def assert_rounded(ours, plain, exact):
    """Ours has at most twice the error of the model without trees."""
    of_ours, of_plain = error_of(ours, exact), error_of(plain, exact)
    print(f"relative error {of_ours:.3g}, without trees {of_plain:.3g}")
    assert error_ratio(of_ours, of_plain, torch.finfo(torch.bfloat16).eps / 2) <= MAX_RATIO


@pytest.mark.parametrize("kind", LOW)
def test_patched_models_in_bfloat16(kind, monkeypatch):
    model, rows = model_of(kind, monkeypatch, **LOW[kind]), long_rows()
    exact = alone(model, rows)
    model = model.bfloat16().to(DEVICE)
    plain = sums_of(model, each_alone(rows))
    assert_rounded(sums_of(patch(model), [on_gpu(padded(rows))]), plain, exact)


@pytest.mark.parametrize("backend", ["cudnn", "fla", "mamba_ssm"])
def test_named_libraries(backend, monkeypatch):
    """Each by its name, where it is installed."""
    library = {"fla": libraries.OPERATORS[0], "mamba_ssm": libraries.OPERATORS[1]}.get(backend)
    if not (attention.installed() if library is None else library.installed()):
        pytest.skip(f"{backend} is not installed")
    kind = {"cudnn": "qwen3", "fla": "qwen3_5", "mamba_ssm": "mamba2"}[backend]
    model, rows = model_of(kind, monkeypatch, **LOW[kind]), long_rows()
    exact = alone(model, rows)
    model = model.bfloat16().to(DEVICE)
    plain = sums_of(model, each_alone(rows))
    assert_rounded(sums_of(patch(model, backend=backend), [on_gpu(padded(rows))]), plain, exact)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5", "gpt_oss", "granitemoehybrid"])
@pytest.mark.parametrize("strategy", ["partition", "tree-packing"])
def test_the_engine(kind, strategy, request, tmp_path):
    folder, rows = init_model(request.getfixturevalue("espalier"), tmp_path, kind), small_rows(4, "sft")
    found = []
    for device in ("cpu", DEVICE):
        engine = engine_of(folder, strategy=strategy, device=device)
        engine.forward_backward(rows)
        found.append(engine.gradients())
    assert worst_of_engine(found[1], found[0]) <= EXACT


def test_the_engine_trains_in_bfloat16(request, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3"] | LOW["qwen3"]))
    request.getfixturevalue("espalier")("init", "--config", tmp_path / "config.json", "--out", tmp_path / "model", "--seed", 1, "--dtype", "bfloat16")  # fmt: skip
    rows, losses = small_rows(4, "sft"), []
    engine = espalier.Engine(tmp_path / "model", dtype="bfloat16", device=DEVICE, token_budget=64)
    for _ in range(10):
        losses.append(engine.forward_backward(rows)["loss"])
        engine.optim_step(learning_rate=1e-3)
    assert losses[-1] < losses[0]
