# SPDX-License-Identifier: Apache-2.0
"""Patched models that train while another thread generates with them."""

import contextlib
import functools
import threading

import pytest
import torch

import espalier
from espalier.hf import patch, verify
from espalier.hf.families import backbone_of
from espalier.hf.float64 import InFloat64
from hf_forced_routes import forced_alone, recorded_routes
from hf_models import HookOfEspalier, alone, branching_rows, make_model, padded, sums_of, worst_error

EXACT = 1e-12
SECONDS = 120  # a test that waits longer has failed


@functools.cache
def expected(kind):
    return alone(make_model(kind), branching_rows())


def generated(model):
    with torch.no_grad():
        return model.generate(torch.tensor([[5, 6, 7]]), do_sample=False, max_new_tokens=2, pad_token_id=0,
                              eos_token_id=None)  # fmt: skip


@contextlib.contextmanager
def generation_in_between(model, found):
    """Once the first layer runs on a forest, another thread generates, and waits in the first layer of its first forward
    until this context ends. Appends what it generates to `found`."""
    is_inside, may_go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: found.append(generated(model)))

    def meet(_layer, _args, kwargs):
        if kwargs.get("espalier_tree") is None:
            is_inside.set()
            assert may_go_on.wait(SECONDS)
        elif not is_inside.is_set() and not thread.is_alive():
            thread.start()
            assert is_inside.wait(SECONDS)

    hook = backbone_of(model).layers[0].register_forward_pre_hook(HookOfEspalier(meet), with_kwargs=True)
    try:
        yield
    finally:
        may_go_on.set()
        if thread.ident is not None:
            thread.join(SECONDS)
        hook.remove()


@pytest.mark.parametrize("kind", ["qwen3", "olmo3", "qwen3_5", "mamba2"])
def test_generation_beside_training(kind):
    model, found, theirs = patch(make_model(kind)), [], expected(kind)
    before = generated(model)
    with generation_in_between(model, found), InFloat64():
        assert worst_error(sums_of(model, [padded(branching_rows())]), theirs) <= EXACT
    assert torch.equal(found[0], before)


def test_layers_that_backward_computes_again():
    model, found = patch(make_model("qwen3")), []
    theirs = sums_of(model, [padded(branching_rows())])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.eval()  # so that generation has its cache
    backbone_of(model).layers.train()
    with generation_in_between(model, found):
        assert worst_error(sums_of(model, [padded(branching_rows())]), theirs) <= EXACT
    assert len(found) == 1


def test_compiled_layers():
    model, found = patch(make_model("qwen3")), []
    theirs, before = sums_of(model, [padded(branching_rows())]), generated(model)
    torch._dynamo.reset()  # models of other tests
    for layer in backbone_of(model).layers:
        layer.compile(backend="aot_eager")
    assert torch.equal(generated(model), before)  # compiled for generation first
    with generation_in_between(model, found):
        assert worst_error(sums_of(model, [padded(branching_rows())]), theirs) <= EXACT
        assert worst_error(sums_of(model, [padded(branching_rows())]), theirs) <= EXACT
    assert torch.equal(found[0], before)
    torch._dynamo.reset()


def test_a_step():
    model, found, theirs = patch(make_model("qwen3_5")), [], expected("qwen3_5")
    before = generated(model)
    plan = espalier.plan(espalier.build(branching_rows()), token_budget=5, strategy="partition")
    model.zero_grad()
    with generation_in_between(model, found), InFloat64():
        step, total = espalier.Step(model, plan), 0
        for batch in step:
            loss = -step.logprobs(batch).sum()
            step.backward(loss)
            total += loss.item()
    ours = total, {name: parameter.grad for name, parameter in model.named_parameters()}
    assert worst_error(ours, theirs) <= EXACT
    assert torch.equal(found[0], before)


def test_replayed_routes():
    model, rows, found = make_model("qwen3_moe"), branching_rows(), []
    recorded = recorded_routes(model, rows)
    theirs, batch = forced_alone(model, rows, recorded), padded(rows)
    table = torch.full((*batch["input_ids"].shape, *recorded[0].shape[1:]), -1)
    table[batch["attention_mask"].bool()] = torch.cat(recorded)
    before = generated(patch(model))
    routed = batch | {"routed_experts": table}
    sums_of(model, [routed])  # routers have their hooks now
    is_inside, may_go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: found.append(generated(model)))
    layer = backbone_of(model).layers[0]

    def before_router(_module, _args):
        if threading.current_thread() is thread:
            is_inside.set()
            assert may_go_on.wait(SECONDS)
        elif not thread.is_alive() and not is_inside.is_set():
            thread.start()
            assert is_inside.wait(SECONDS)

    hook = layer.mlp.register_forward_pre_hook(HookOfEspalier(before_router))  # between its mixer and its router
    try:
        with InFloat64():
            assert worst_error(sums_of(model, [routed]), theirs) <= EXACT
    finally:
        may_go_on.set()
        thread.join(SECONDS)
        hook.remove()
    assert torch.equal(found[0], before)


def test_verification_with_checkpoints_rests_in_all_threads():
    """Backward on a GPU computes layers again in threads of autograd."""
    model = patch(make_model("qwen3", torch.float32))
    rest = backbone_of(model)._espalier.rest
    seen = []
    with rest.everywhere():
        thread = threading.Thread(target=lambda: seen.append((rest.is_on(), model.model.config._attn_implementation)))
        thread.start()
        thread.join(SECONDS)
    with rest.here():
        thread = threading.Thread(target=lambda: seen.append((rest.is_on(), model.model.config._attn_implementation)))
        thread.start()
        thread.join(SECONDS)
    assert seen == [(True, "sdpa"), (False, "espalier")] and not rest.is_on()
    assert verify(model, padded(branching_rows())).passed
