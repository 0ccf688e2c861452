# SPDX-License-Identifier: Apache-2.0
"""Targets that are not the next token (target_ids), in espalier.Engine: against Transformers in float64, row by row."""

import numpy as np
import pytest
import torch

import espalier as package
import transformers_reference as reference
from conftest import seed_of
from engines import EXACT, engine_of, init_model, transformers_gradients, worst_error
from small_models import random_rows

PLANS = [
    {"token_budget": 0},
    {"strategy": "partition", "token_budget": 9},
    {"strategy": "tree-packing", "token_budget": 18},
    {"strategy": "sequence-packing", "token_budget": 18},
]


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"])
def folder(request, tmp_path_factory, espalier):
    return init_model(espalier, tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def columns():
    """Rows of a random forest, some of them twice with unlike targets, as columns. Half of the targets are other tokens."""
    draw = np.random.default_rng(seed_of(51))
    rows = [np.asarray(row["input_ids"], np.int32) for row in random_rows(51, "sft") if len(row["input_ids"]) > 1]
    rows += rows[:3]
    tokens = np.concatenate(rows)
    targets = np.where(draw.random(len(tokens)) < 0.5, tokens, draw.integers(0, 8, len(tokens))).astype(np.int32)
    mask = (draw.random(len(tokens)) < 0.8).astype(np.uint8)
    offsets = np.cumsum([0, *map(len, rows)])
    mask[offsets[1:] - 1] = 1  # every row has a term
    return {"offsets": offsets, "input_ids": tokens, "target_ids": targets, "loss_mask": mask}


def by_row(columns, name):
    return np.split(columns[name], columns["offsets"][1:-1])


def loss_of(columns, weights):
    """Minus the weighted sum of the log-probabilities of all terms, weights of both signs."""
    def loss(logprobs, positions):
        return -sum((row[places] * values).sum() for row, places, values in zip(weights, positions, logprobs))

    return loss


def reference_loss(columns, weights):
    def loss(model):
        total = 0
        for ids, targets, mask, row in zip(*(by_row(columns, name) for name in ("input_ids", "target_ids", "loss_mask")), weights):
            places = np.flatnonzero(mask[1:]) + 1
            logits = model(torch.from_numpy(ids[None].astype(np.int64))).logits[0]
            logprobs = torch.log_softmax(logits, -1)[places - 1, targets[places]]
            total = total - (row[places] * logprobs).sum()
        return total

    return loss


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "-".join(map(str, plan.values())))
def test_targets_are_what_terms_predict(folder, columns, plan):
    draw = np.random.default_rng(seed_of(52))
    weights = [torch.from_numpy(draw.standard_normal(len(row))) for row in by_row(columns, "input_ids")]
    expected, gradients = transformers_gradients(folder, reference_loss(columns, weights))
    engine = engine_of(folder, **plan)
    rows = package.trajectories(columns)
    metrics = engine.forward_backward(rows, loss_of(columns, weights))
    assert metrics["loss"] == pytest.approx(expected, rel=EXACT, abs=EXACT)
    assert worst_error(engine.gradients(), gradients) <= EXACT
    # Negative control: the tokens themselves as targets.
    engine.zero_gradients()
    engine.forward_backward(package.trajectories({**columns, "target_ids": columns["input_ids"]}), loss_of(columns, weights))
    assert worst_error(engine.gradients(), gradients) > 1e-3


def test_logprobs_are_of_the_targets(folder, columns):
    engine = engine_of(folder)
    ours = engine.logprobs(package.trajectories(columns))
    with reference.norms_in_model_dtype(torch.float64), torch.no_grad():
        model = reference.load_model(folder, torch.float64)
        for values, ids, targets in zip(ours, by_row(columns, "input_ids"), by_row(columns, "target_ids")):
            logprobs = torch.log_softmax(model(torch.from_numpy(ids[None].astype(np.int64))).logits[0], -1)
            theirs = logprobs[np.arange(len(ids) - 1), targets[1:]].numpy()
            assert np.abs(values[1:] - theirs).max() <= EXACT * max(1, np.abs(theirs).max())


def test_unlike_targets_of_equal_rows_are_encoded_once(folder):
    tokens = np.array([5, 6, 7, 8], np.int32)
    columns = {"offsets": np.array([0, 4, 8]), "input_ids": np.tile(tokens, 2), "target_ids": np.array([5, 6, 7, 8, 5, 1, 2, 3])}
    metrics = engine_of(folder, token_budget=0).forward_backward(package.trajectories(columns))
    assert (metrics["flat_tokens"], metrics["encoded_tokens"], metrics["loss_terms"]) == (8, 4, 6)


def test_targets_that_cannot_be_used(folder, columns):
    engine = engine_of(folder)
    with pytest.raises(package.InputError, match="target_ids`: expected token ids from 0 and below .* received -1"):
        engine.forward_backward(package.trajectories({**columns, "target_ids": np.full_like(columns["target_ids"], -1)}))
    with pytest.raises(package.InputError, match="shared_targets: expected sum with target_ids, received once"):
        engine.forward_backward(package.trajectories(columns), shared_targets="once")
    with pytest.raises(package.InputError, match="target_ids: expected .* entries, received 1"):
        package.trajectories({**columns, "target_ids": np.array([1], np.int32)})
