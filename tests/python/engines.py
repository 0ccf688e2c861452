# SPDX-License-Identifier: Apache-2.0
"""What the tests of espalier.Engine have in common."""

import hashlib
import json

import numpy as np
import torch

import espalier
import transformers_reference as reference
from conftest import seed_of
from small_models import MODELS, MORE_FAMILIES

EXACT = 1e-12


def init_model(run, folder, kind="qwen3", dtype="float64"):
    """A small random model; `run` is the fixture `espalier`."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps((MODELS | MORE_FAMILIES)[kind]))
    run("init", "--config", folder / "config.json", "--out", folder / "model", "--seed", seed_of(11), "--dtype", dtype)
    return folder / "model"


def engine_of(model, **options):
    """In float64, in micro-batches of few tokens."""
    return espalier.Engine(model, **{"dtype": "float64", "token_budget": 24, "threads": torch.get_num_threads()} | options)


def worst_error(ours, theirs):
    """The largest relative error of gradients by name; small ones are measured by what is 1e-6 of all."""
    assert ours.keys() == theirs.keys() and ours
    theirs = {name: np.asarray(value, np.float64) for name, value in theirs.items()}
    everything = np.sqrt(sum(np.square(value).sum() for value in theirs.values()))
    scale = lambda value: max(np.linalg.norm(value), 1e-6 * everything)
    return max(np.linalg.norm(ours[name].reshape(value.shape) - value) / scale(value) for name, value in theirs.items())


def transformers_gradients(folder, loss_of):
    """Loss and gradients of loss_of(model) in float64, each trajectory by itself."""
    model = reference.load_model(folder, torch.float64)
    with reference.norms_in_model_dtype(torch.float64):
        loss = loss_of(model)
        found = reference.gradients(model, loss)
    return loss.item(), {name: gradient.numpy() for name, gradient in found.items()}


def files_of(folder):
    """Digests of a checkpoint's weights and of its optimiser's state."""
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
            for name in ("model.safetensors", "optimizer.safetensors")}  # fmt: skip


def terms_of(row):
    """Positions of the tokens that carry loss."""
    return [t for t, weight in enumerate(reference.weights_of(row)) if weight and t > 0]
