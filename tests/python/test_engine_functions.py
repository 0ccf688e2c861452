# SPDX-License-Identifier: Apache-2.0
"""Losses that are functions of Python, in espalier.Engine: against built-in objectives and Transformers in float64."""

import pytest
import torch

import espalier as package
import transformers_reference as reference
from engines import EXACT, engine_of, init_model, terms_of, transformers_gradients, worst_error
from small_models import random_rows

PLANS = [
    {"token_budget": 0},
    {"strategy": "partition", "token_budget": 9},
    {"strategy": "partition", "token_budget": 9, "checkpoint_activations": "piece"},
    {"strategy": "tree-packing", "token_budget": 18},
    {"strategy": "sequence-packing", "token_budget": 18},
]


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"])
def folder(request, tmp_path_factory, espalier):
    return init_model(espalier, tmp_path_factory.mktemp(request.param), request.param)


def sft_of(rows):
    weights = [torch.tensor(reference.weights_of(row), dtype=torch.float64) for row in rows]
    total = sum(row[1:].sum() for row in weights)
    return lambda logprobs, positions: -sum(
        (row[places] * values).sum() for row, places, values in zip(weights, positions, logprobs)) / total


def grpo_of(rows):
    total = sum(sum(reference.weights_of(row)[1:]) for row in rows)

    def loss(logprobs, positions):
        result = 0
        for row, places, values in zip(rows, positions, logprobs, strict=True):
            weights = torch.tensor(reference.weights_of(row), dtype=torch.float64)[places]
            old = torch.tensor([0.0, *row["logprobs"][1:]], dtype=torch.float64)[places] if "logprobs" in row else values.detach()
            ratio = (values - old).exp()
            gain = torch.minimum(ratio * row["advantage"], ratio.clamp(0.8, 1.2) * row["advantage"])
            result = result - (weights * gain).sum()
        return result / total

    return loss


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "-".join(map(str, plan.values())))
@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_a_function_is_as_good_as_the_objective(folder, kind, plan):
    rows = random_rows(31, kind)
    built_in = engine_of(folder, **plan)
    expected = built_in.forward_backward(rows, kind)
    engine = engine_of(folder, **plan)
    metrics = engine.forward_backward(rows, {"sft": sft_of, "grpo": grpo_of}[kind](rows))
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=EXACT)
    assert metrics["loss_terms"] == expected["loss_terms"]
    assert worst_error(engine.gradients(), built_in.gradients()) <= EXACT
    # Negative control: another loss.
    engine.zero_gradients()
    wrong = sft_of(rows[:-2] + [{**row, "loss_weights": [0.5] * len(row["input_ids"])} for row in rows[-2:]])
    engine.forward_backward(rows, wrong)
    assert worst_error(engine.gradients(), built_in.gradients()) > 1e-6


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "-".join(map(str, plan.values())))
def test_a_loss_of_all_rows_at_once(folder, plan):
    """One that is no sum over tokens, rows or groups: what pairs of rows differ by, all pairs against each other."""
    rows = [row for row in random_rows(32, "sft") if terms_of(row)]

    def loss_of_sums(sums):
        differences = sums.unsqueeze(0) - sums.unsqueeze(1)
        return torch.nn.functional.softplus(0.1 * differences).mean() + 0.01 * sums.std()

    def of_transformers(model):
        sums = [reference.token_logprobs(model, row["input_ids"])[[t - 1 for t in terms_of(row)]].sum() for row in rows]
        return loss_of_sums(torch.stack(sums))

    loss, expected = transformers_gradients(folder, of_transformers)
    engine = engine_of(folder, **plan)
    metrics = engine.forward_backward(rows, lambda logprobs, _: loss_of_sums(torch.stack([row.sum() for row in logprobs])))
    assert metrics["loss"] == pytest.approx(loss, rel=EXACT)
    assert worst_error(engine.gradients(), expected) <= EXACT


def test_what_a_function_is_given(folder):
    rows = random_rows(33, "sft")
    engine = engine_of(folder)
    policy = engine.logprobs(rows)
    calls = []

    def loss(logprobs, positions):
        calls.append((logprobs, positions))
        every = torch.cat(logprobs)
        return every.square().sum(), {"rows": len(logprobs), "largest": every.max().detach()}

    metrics = engine.forward_backward(rows, loss)
    ((logprobs, positions),) = calls
    assert [places.tolist() for places in positions] == [terms_of(row) for row in rows]
    for values, places, whole in zip(logprobs, positions, policy, strict=True):
        assert values.dtype == torch.float64
        torch.testing.assert_close(values.detach(), torch.from_numpy(whole)[places], rtol=EXACT, atol=EXACT)
    assert metrics["rows"] == len(rows) and metrics["largest"] == torch.cat(logprobs).max().item()
    # Under no_grad as well, and with chosen rows in the order in which they are named.
    with torch.no_grad():
        engine.forward_backward(rows, loss, indices=[5, 0])
    assert [places.tolist() for places in calls[1][1]] == [terms_of(rows[5]), terms_of(rows[0])]


@pytest.mark.parametrize("function, received", [
    (lambda logprobs, positions: 3.0, "received float"),
    (lambda logprobs, positions: logprobs[0], r"received a tensor of shape \(\d+,\)"),
    (lambda logprobs, positions: torch.tensor(1.0), "received one that does not require a gradient"),
    (lambda logprobs, positions: torch.ones((), requires_grad=True) * 2, "received one that does not"),
    (lambda logprobs, positions: torch.cat(logprobs).sum() * float("nan"), "loss nan"),
    (lambda logprobs, positions: (torch.cat(logprobs) - torch.cat(logprobs).detach()).abs().sqrt().sum(),
     "gradient norm nan"),
])  # fmt: skip
def test_a_function_that_returns_no_loss(folder, function, received):
    rows = random_rows(34, "sft")
    engine = engine_of(folder)
    engine.forward_backward(rows)
    with pytest.raises(package.InputError, match=received):
        engine.forward_backward(rows, function)
    assert engine.gradients() == {}
    engine.forward_backward(rows)


def test_an_exception_of_a_function_comes_out_as_it_is(folder):
    rows = random_rows(35, "sft")
    engine = engine_of(folder)

    def fails(logprobs, positions):
        raise ZeroDivisionError("of the function")

    with pytest.raises(ZeroDivisionError, match="of the function"):
        engine.forward_backward(rows, fails)
    with pytest.raises(package.InputError, match="normalize: expected no such option beside a function"):
        engine.forward_backward(rows, fails, normalize="token")
    assert engine.gradients() == {}
    loss = engine.forward_backward(rows)["loss"]
    assert loss == engine_of(folder).forward_backward(rows)["loss"]
