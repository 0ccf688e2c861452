# SPDX-License-Identifier: Apache-2.0
"""Models that other people's code has changed: patched, they give what they give unpatched, or are refused (model_changes.py).

`python tests/python/model_changes.py --cases 10000` is the long form.
"""

import contextlib
import itertools
import os
import random

import peft
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import distributed
from torch.distributed.fsdp import fully_shard

import espalier
from changed_functions import METHODS
from changed_modules import Change, Redraw, base_of
from conftest import seed_of
from espalier.hf import patch, sharing
from model_changes import PAIRS, Case, apart, draw_batch, draw_case, judge, new_model, result_of, step, table

GROUPS = 36
CASES = 3 if os.environ.get("ESPALIER_LONG_TESTS", "0") != "0" else 1  # of each pair


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_changes(group):
    results = [result_of(pair, seed_of(number)) for pair in PAIRS[group::GROUPS] for number in range(CASES)]
    results = [result for result in results if result is not None]
    print(table(results))
    wrong = [f"{result.text}\n  " + "\n  ".join(result.faults) for result in results if result.faults]
    assert not wrong, "\n".join(wrong)


def test_there_are_enough_cases():
    assert len(PAIRS) >= 100
    assert all(result_of(pair, seed_of(1)) is not None for pair in PAIRS[::20])


# What has to be shared


def unchanged(kind="qwen3", *, wrap=None, install=lambda model: lambda: None, when="before"):
    """A Case with a change that does nothing unless `wrap` or `install` say what."""
    change = Change("nothing", install, is_exact=True, wrap=wrap)
    return Case(("x", "y"), 1, kind, change, when, removed=False, form="equal", reading="with", positions=False, steps=1,
                unpatched=False, draws=0, rng=random.Random(seed_of(1)))  # fmt: skip


def exact_results(pair, count, sabotage=None):
    """Results of the first cases of a pair whose change acts on each token alone, and does something."""
    words = ("scale", "bias", "activation", "relu_mlp", "mean_norm")
    found = []
    for seed in itertools.count():
        case = draw_case(pair, seed_of(seed))
        if case.change.is_exact and "gradient" not in case.change.text and any(word in case.change.text for word in words):
            with contextlib.suppress(Redraw):
                found.append(judge(case, sabotage))
        if len(found) == count:
            return found


@pytest.mark.parametrize("how", ["class", "object", "subclass", "wrapper"])
@pytest.mark.parametrize("what", ["mlp", "input norm", "final norm", "q_norm"])
def test_code_for_each_token_is_shared(what, how):
    for result in exact_results((what, how), 4):
        assert (result.status, result.faults) == ("shared", []), f"{result.text}: {result.message}"


def assert_shared(case):
    result = judge(case)
    assert (result.status, result.faults) == ("shared", []), f"{result.text}: {result.message}"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next", "gpt_oss"])
def test_hooks_of_accelerate_are_shared(kind, when):
    def install(model):
        for module in (*base_of(model).base_model.layers, base_of(model).get_input_embeddings()):
            add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True), append=True)
        return lambda: None

    assert_shared(unchanged(kind, install=install, when=when))


@pytest.mark.parametrize("when", ["before", "after", "step"])
def test_hooks_of_transformers_are_shared(when):
    """Those for gradients of embeddings, which checkpointing of adapters needs."""

    def install(model):
        model.enable_input_require_grads()
        return lambda: None

    assert_shared(unchanged("llama", install=install, when=when))


@pytest.mark.parametrize("method", ["lora", "lora of the head", "dora", "saved head"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_are_shared(method, when):
    def wrap(model):
        torch.manual_seed(seed_of(7))
        return peft.get_peft_model(model, METHODS[method](["q_proj", "v_proj"])).to(torch.float64).train()

    assert_shared(unchanged("qwen3", wrap=wrap, when=when))


@pytest.fixture
def one_process(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_fsdp_are_shared(one_process, when):
    case = unchanged("qwen3")
    batch, model, sharded = draw_batch(case), new_model(case), new_model(case)
    theirs = step(model, batch, "before")
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    shard = lambda: [fully_shard(module, mesh=mesh) for module in (*sharded.model.layers, sharded)]
    patch(sharded) if when == "after" else shard()
    shard() if when == "after" else patch(sharded)
    ours = step(sharded, batch, "before")
    ours.gradients = {name: gradient.full_tensor() for name, gradient in ours.gradients.items()}
    assert apart(ours, theirs)[0] <= 1e-9
    assert sharing(sharded).tree_tokens < sharing(sharded).flat_tokens


# Negative controls


def test_a_change_that_the_patched_model_alone_has_is_wrong():
    for result in exact_results(("input norm", "object"), 3, "the patched model alone"):
        assert result.status == "wrong" and any("error" in fault for fault in result.faults)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_tokens_that_see_other_branches_are_wrong(kind):
    result = judge(unchanged(kind), "attention")
    assert result.status == "wrong" and "shared: error" in result.faults[0]


def test_another_error_than_a_refusal_is_wrong(monkeypatch):
    def fail(*_):
        raise TypeError("no")

    monkeypatch.setattr(espalier.hf, "patch", fail)
    assert judge(unchanged()).faults == ["changed: patch raises TypeError: no"]


def test_a_refusal_that_stays_after_a_change_is_taken_back_is_wrong(monkeypatch):
    def refuse(*_):
        raise espalier.errors.Unsupported("no")

    monkeypatch.setattr(espalier.hf, "patch", refuse)
    case = unchanged()
    assert (judge(case).status, judge(case).faults) == ("refused", [])
    case.removed = True
    assert judge(case).faults == ["removed: patch refuses: no"]
