# SPDX-License-Identifier: Apache-2.0
"""tree_attention by cudnn.flex_attention, which a stand-in plays on the CPU in float64 (cudnn_stand_in.py)."""

import importlib.metadata
import warnings

import numpy as np
import pytest
import torch

import espalier
import transformers_reference as reference
from conftest import seed_of
from cudnn_stand_in import installed
from engines import engine_of, init_model, transformers_gradients
from engines import worst_error as worst_of_engine
from espalier import ops
from espalier.hf import patch
from espalier.hf.float64 import InFloat64
from espalier.kernels import attention, waves
from hf_models import alone, branching_rows, make_model, padded, sums_of, worst_error
from small_models import random_rows as small_rows
from test_step import plan_of, step_sums

EXACT = 1e-12


@pytest.fixture
def library(monkeypatch):
    with installed(monkeypatch) as stand_in:
        yield stand_in


def random_rows(generator, count=10, depth=9):
    """Rows that branch off others at random, end inside them, or are repeated."""
    rows = [generator.integers(0, 3, generator.integers(1, depth)).tolist()]
    while len(rows) < count:
        stem = rows[generator.integers(len(rows))]
        rows.append(stem[:generator.integers(len(stem) + 1)] + generator.integers(0, 3, generator.integers(1, depth)).tolist())
    return rows


@pytest.mark.parametrize("window", [0, 1, 3])
def test_intervals_of_layouts(window):
    generator = np.random.default_rng(seed_of(1))
    for most_leaves_first in (False, True):
        layout = espalier.build(random_rows(generator), most_leaves_first=most_leaves_first).layout()
        bounds = layout.visible_intervals(window)
        query, key = np.arange(layout.num_tokens)[:, None], np.arange(layout.num_tokens)[None, :]
        seen = key < bounds[0][:, None]
        for row in range(1, len(bounds), 2):
            seen |= (bounds[row][:, None] <= key) & (key < bounds[row + 1][:, None])
        expected = (key <= query) & (query < layout.subtree_end[None, :])
        if window:
            expected &= layout.position_ids[:, None] - layout.position_ids[None, :] < window
        assert len(bounds) % 2 == 1 and (np.diff(bounds, axis=0) >= 0).all() and (seen == expected).all()


def problem(seed, *, window=0, sinks=False, context=False, value_dim=8):
    """Arguments of ops.tree_attention, gradients wanted. The context is a segment whose first keys all tokens see, and
    others some, and of which one is seen by none."""
    generator = np.random.default_rng(seed_of(seed))
    layout = espalier.build(random_rows(generator)).layout()
    torch.manual_seed(seed_of(seed))
    tokens, heads, key_heads, dim = layout.num_tokens, 4, 2, 8

    def leaf(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    arguments = {"q": leaf(tokens, heads, dim), "k": leaf(tokens, key_heads, dim), "v": leaf(tokens, key_heads, value_dim),
                 "subtree_end": torch.from_numpy(layout.subtree_end.copy()), "softmax_scale": 0.3}  # fmt: skip
    if sinks:
        arguments["sinks"] = leaf(heads)
    if context:
        arguments["context_k"] = [leaf(6, key_heads, dim), leaf(3, key_heads, dim)]
        arguments["context_v"] = [leaf(6, key_heads, value_dim), leaf(3, key_heads, value_dim)]
        roots = np.flatnonzero(layout.prev == -1)
        end = int(layout.subtree_end[roots[0]])
        arguments["context_blocks"] = torch.tensor([[0, 0, 3, 0, tokens], [0, 4, 6, 0, end], [1, 1, 3, 0, end]])
        arguments["context_positions"] = torch.tensor([0, 3, 5])
    if window:
        arguments |= {"sliding_window": window, "position": torch.from_numpy(layout.position_ids + 7 * context)}
    return arguments


def results(arguments):
    """The output and the gradients of all that has any."""
    return results_of_leaves(arguments, [ops.tree_attention(**arguments)])


def results_of_leaves(arguments, outs):
    """What an operator has given for `arguments`, and the gradients of all that has any."""
    leaves = [each for value in arguments.values() for each in (value if isinstance(value, list) else [value])
              if isinstance(each, torch.Tensor) and each.requires_grad]  # fmt: skip
    torch.manual_seed(seed_of(0))
    total = sum((out * torch.randn(out.shape, dtype=out.dtype)).sum() for out in outs)
    return [*(out.detach() for out in outs), *torch.autograd.grad(total, leaves)]


def worst(ours, theirs):
    return max(((a - b).norm() / b.norm().clamp(min=1e-3)).item() for a, b in zip(ours, theirs, strict=True))


CASES = [dict(window=window, sinks=sinks, context=context) for window in (0, 2, 6) for sinks in (False, True)
         for context in (False, True)]  # fmt: skip
CASES += [dict(value_dim=5), dict(value_dim=16, context=True), dict(value_dim=5, window=3, sinks=True, context=True)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_operator(case, monkeypatch):
    for seed in range(8):
        arguments = problem(seed, **case)
        expected = results(arguments)
        with installed(monkeypatch) as stand_in, monkeypatch.context() as here:
            here.setenv("ESPALIER_ATTENTION", "library")
            ours = results(arguments)
        assert stand_in.calls == {"forward": 1, "backward": 1} and stand_in.plans == 1
        assert worst(ours, expected) <= EXACT
        monkeypatch.delenv("ESPALIER_ATTENTION")


SPOILED = {
    "an interval that is shifted": lambda bounds: (bounds + torch.eye(*bounds.shape, dtype=torch.int32)).cummax(0)[0].int(),
    "a child that is missing": lambda bounds: torch.where(torch.arange(bounds.shape[1]) == bounds.shape[1] - 1,
                                                          bounds.shape[1] - 1, bounds).int(),
    "an ancestor that is lost": lambda bounds: torch.cat([torch.zeros_like(bounds[:1]), bounds[1:]]),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILED)
def test_wrong_intervals_are_noticed(name, library, monkeypatch):
    arguments = problem(3)
    right = results(arguments)
    waves._kept.clear()
    library.change = SPOILED[name]
    assert not worst(results(arguments), right) <= 1e-3  # one that sees nothing is not a number


def test_a_wrong_sink_is_noticed(library):
    arguments = problem(4, sinks=True)
    right = results(arguments)
    arguments["sinks"] = (arguments["sinks"] + 0.01).detach().requires_grad_()
    assert worst(results(arguments), right) > 1e-4


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss", "mistral", "qwen3_5"])
def test_patched_models(kind, library):
    rows = branching_rows()
    model = patch(make_model(kind))
    with InFloat64():
        ours = sums_of(model, [padded(rows)])
    assert library.calls["forward"] > 0 < library.calls["backward"]
    assert worst_error(ours, alone(make_model(kind), rows)) <= EXACT


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_partition(kind, library):
    ours = step_sums(make_model(kind), plan_of(branching_rows()))
    assert library.calls["backward"] > 10
    assert worst_error(ours, alone(make_model(kind), branching_rows())) <= EXACT


def test_layers_share_a_plan(library):
    model = patch(make_model("qwen3"))
    sums_of(model, [padded(branching_rows())])
    assert library.calls["forward"] == model.config.num_hidden_layers > library.plans == 1


@pytest.mark.parametrize("strategy", ["partition", "tree-packing"])
@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_the_engine(kind, strategy, library, request, tmp_path):
    folder = init_model(request.getfixturevalue("espalier"), tmp_path / kind, kind)
    rows = small_rows(22, "sft")
    _, expected = transformers_gradients(folder, lambda model: reference.sft_loss(model, rows))
    engine = engine_of(folder, strategy=strategy)
    engine.forward_backward(rows)
    assert library.calls["forward"] > 0 < library.calls["backward"]
    assert worst_of_engine(engine.gradients(), expected) <= EXACT


def test_forests_of_the_engine_have_few_intervals(library, request, tmp_path):
    """Rows whose forest in their own order needs more intervals than the library takes, and results in the order of rows."""
    folder = init_model(request.getfixturevalue("espalier"), tmp_path / "model", "qwen3")
    rows = [{"input_ids": [max(token - 90, 1) for token in row], "trajectory_id": f"t{number}"}
            for number, row in enumerate(caterpillar(20))]  # fmt: skip
    assert len(espalier.build([row["input_ids"] for row in rows]).layout().visible_intervals()) > attention.MOST_BOUNDS
    _, expected = transformers_gradients(folder, lambda model: reference.sft_loss(model, rows))
    engine = engine_of(folder, strategy="tree-packing", token_budget=64)
    engine.forward_backward(rows)
    logprobs = engine.logprobs(rows)
    assert library.calls["forward"] > 0 < library.calls["backward"]
    assert worst_of_engine(engine.gradients(), expected) <= EXACT
    for row, ours in zip(rows, logprobs, strict=True):
        np.testing.assert_allclose(ours, engine.logprobs([row])[0], rtol=1e-12, atol=1e-12)


def test_masks_are_kept_while_they_hold(library):
    """Not for a tensor that was changed, nor where nothing tells of changes."""
    q = torch.randn(3, 1, 8, dtype=torch.float64)

    def plans_of(ends):
        before = library.plans
        out = ops.tree_attention(q, q, q, ends)
        expected = ops.tree_attention(q.float(), q.float(), q.float(), ends.clone()).double()
        assert (out - expected).abs().max() < 1e-5
        return library.plans - before - 1  # that of the copy

    ends = torch.tensor([3, 3, 3], dtype=torch.int32)
    assert [plans_of(ends), plans_of(ends)] == [1, 0]
    ends[1] = 2
    assert [plans_of(ends), plans_of(ends)] == [1, 0]
    with torch.inference_mode():
        ends = torch.tensor([3, 3, 3], dtype=torch.int32)
        assert [plans_of(ends), plans_of(ends)] == [1, 1]
        ends[1] = 2
        assert plans_of(ends) == 1


def caterpillar(depth):
    """Each node has a leaf first and everything else second."""
    return [list(range(100, 101 + level)) + [1] for level in range(depth)]


def test_a_forest_of_many_intervals_is_left_to_others(library):
    layouts = [espalier.build(caterpillar(40), most_leaves_first=first).layout() for first in (False, True)]
    assert [(len(layout.visible_intervals()) + 1) // 2 for layout in layouts] == [40, 2]
    attention._warn_of_many_intervals.cache_clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for layout in layouts:
            q = torch.randn(layout.num_tokens, 1, 8, dtype=torch.float64)
            ours = ops.tree_attention(q, q, q, torch.from_numpy(layout.subtree_end.copy()))
            assert library.calls["forward"] == (layout is layouts[1])
            with torch.no_grad():
                scores = (q[:, 0] @ q[:, 0].T * 8**-0.5)
                number, ends = torch.arange(len(q)), torch.from_numpy(layout.subtree_end.copy())
                hidden = (number[None, :] > number[:, None]) | (number[:, None] >= ends[None, :])
                expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ q[:, 0]
            torch.testing.assert_close(ours[:, 0], expected, rtol=1e-12, atol=1e-12)
    assert len(told) == 1 and "needs more than 16 intervals" in str(told[0].message)


def test_softcaps_are_left_to_others(library, monkeypatch):
    arguments = problem(2, context=True) | {"softcap": 0.7}
    ours = results(arguments)
    assert library.calls == {"forward": 0, "backward": 0}
    monkeypatch.delenv("ESPALIER_ATTENTION")
    assert worst(ours, results(arguments)) == 0


def test_sizes_that_the_library_does_not_know(library):
    q = torch.randn(3, 1, 12, dtype=torch.float64)
    ops.tree_attention(q, q, q, torch.tensor([3, 3, 3], dtype=torch.int32))
    assert library.calls["forward"] == 0


@pytest.mark.parametrize("capability, name", [((9, 0), "a library"), ((8, 0), ""), ((12, 0), "")])
def test_devices_that_the_library_does_not_know(capability, name, monkeypatch):
    """There the qualifier finds nothing to check, and other kernels are chosen at once."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    attention.is_served.cache_clear()
    registered = attention.register("a library")
    try:
        assert torch.ops.espalier.tree_attention_library_name(0) == name
        assert torch.ops.espalier.tree_attention_library_name(-1) == ""
    finally:
        registered._destroy()
        attention.is_served.cache_clear()


@pytest.mark.parametrize("found, name", [("1.32.0", "cudnn-frontend 1.32.0"), ("1.40.0", ""), (None, "")])
def test_which_versions_are_taken(found, name, monkeypatch):
    def version(package):
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda module: object())
    assert attention.installed() == name
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda module: None)
    assert attention.installed() == ""
