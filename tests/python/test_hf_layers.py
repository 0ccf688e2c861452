# SPDX-License-Identifier: Apache-2.0
"""Layers of families that a proof lets in: values narrower than keys, softcaps, chunks, short convolutions, Mamba-2, gated
deltas, and layers that do not pass on the forest. On random forests, whole and in pieces, in float64, against each row alone."""

import copy
import functools
import random
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import espalier
from conftest import seed_of
from espalier.errors import Unsupported
from espalier.hf import attention, older_mixers, patch, patching, proof, told, unpatch
from espalier.hf.asked_attention import Attention, Chunks
from espalier.hf.float64 import InFloat64
from espalier.hf.run import TreeRun
from espalier.hf.small_copy import Scale, draw_weights, small_model
from hf_default_models import default_model
from hf_models import alone, padded, sums_of, worst_error
from test_step import random_rows, step_sums

EXACT = 1e-11
SETTINGS = {
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gemma2": {"final_logit_softcapping": None},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 2, "num_hidden_layers": 6},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 2, "num_hidden_layers": 6},
}  # fmt: skip
FAMILIES = ["deepseek_v3", "minicpm3", "mimo_v2_flash", "gemma2", "llama4_text", "lfm2", "bamba", "nemotron_h", "falcon_h1",
            "zamba2", "minimax", "olmo_hybrid", "stablelm", "bart", "opt"]  # fmt: skip
IN_PIECES = [kind for kind in FAMILIES if kind != "falcon_h1"]  # whose head scales logits


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """No verdicts of other tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(proof, "_verdicts", {})


@functools.cache
def config_of(kind):
    """Of a model with a head, small, with every kind of layer."""
    model = default_model(kind, **SETTINGS.get(kind, {}))
    cls = next(cls for cls in type(model).__mro__ if cls.__module__.startswith("transformers.models."))
    config = small_model(cls, model.config, Scale(window=3)).config
    config.vocab_size = 61
    return config


def make(kind, seed=1):
    config = config_of(kind)
    torch.manual_seed(seed_of(seed))
    model = AutoModelForCausalLM.from_config(config).double()
    draw_weights(model)
    for module in model.modules():
        if hasattr(module, "decay_factors"):  # which were rounded to float32
            module.query_decay, module.key_decay, module.diagonal_decay = module.decay_factors(module.slope_rate)
    return model.train()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", FAMILIES)
def test_random_forests(kind, seed):
    rows = random_rows(seed)
    print(f"rows {rows}")
    theirs, model = alone(make(kind), rows), patch(make(kind))
    with InFloat64():
        assert worst_error(sums_of(model, [padded(rows)]), theirs) <= EXACT
    assert espalier.hf.sharing(model).ratio > 1


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", IN_PIECES)
def test_random_forests_in_pieces(kind, seed):
    rng, rows = random.Random(seed_of(seed + 50)), random_rows(seed)
    plan = espalier.plan(espalier.build(rows), token_budget=rng.randrange(2, 8))
    print(f"rows {rows}, budget {plan.token_budget}")
    sums = step_sums(make(kind), plan, recompute=seed == 1)
    assert worst_error(sums, alone(make(kind), rows)) <= EXACT


@pytest.mark.parametrize("kind", FAMILIES)
def test_gradient_checkpointing(kind):
    """Computing again is outside of InFloat64, so nothing else may be inside."""
    batch, model = padded(random_rows(3)), patch(make(kind))
    theirs = sums_of(model, [batch])
    model.gradient_checkpointing_enable()
    assert worst_error(sums_of(model, [batch]), theirs) <= EXACT


def layout_of(rows):
    return espalier.build(rows).layout()


def plain(run, asked, window=0):
    """By a mask [T, T], token by token."""
    number = torch.arange(run.num_tokens)
    ends, position = run.subtree_end, run.position
    ancestor = (number[None, :] <= number[:, None]) & (number[:, None] < ends[None, :])
    if asked.window:
        ancestor &= position[:, None] - position[None, :] < asked.window
    if asked.chunk:
        ancestor &= position[:, None] // asked.chunk == position[None, :] // asked.chunk
    repeats = asked.query.shape[1] // asked.key.shape[1]
    key, value = (tensor[0].repeat_interleave(repeats, 0) for tensor in (asked.key, asked.value))
    logits = asked.query[0] @ key.transpose(1, 2) * asked.scale
    if asked.softcap:
        logits = asked.softcap * torch.tanh(logits / asked.softcap)
    logits = logits.masked_fill(~ancestor, float("-inf"))
    if asked.sinks is not None:
        logits = torch.cat([logits, asked.sinks[:, None, None].expand(-1, run.num_tokens, 1)], -1)
    weights = logits.softmax(-1)[..., :run.num_tokens]
    return (weights @ value).transpose(0, 1).unsqueeze(0)


CASES = {
    "narrow values": {"value_width": 5},
    "wide values": {"value_width": 12},
    "chunks": {"chunk": 3},
    "chunks of narrow values": {"chunk": 4, "value_width": 5},
    "softcap": {"softcap": 0.7},
    "softcap and window": {"softcap": 0.7, "window": 3},
    "softcap, chunks and sinks": {"softcap": 0.7, "chunk": 3, "with_sinks": True, "value_width": 5},
    "narrow values, window and sinks": {"window": 3, "with_sinks": True, "value_width": 5},
}  # fmt: skip


def asked_with(run, value_width=8, with_sinks=False, **options):
    shapes = [(1, 4, run.num_tokens, 8), (1, 2, run.num_tokens, 8), (1, 2, run.num_tokens, value_width)]
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if with_sinks else None
    return Attention(*tensors, scale=0.6, sinks=sinks, **options)


@pytest.mark.parametrize("backend", ["espalier", "sdpa"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_attention(case, backend, seed):
    """Every form against a mask [T, T]."""
    torch.manual_seed(seed_of(seed))
    rows = random_rows(seed)
    print(f"rows {rows}")
    run = TreeRun(layout_of(rows), torch.device("cpu"), backend)
    asked = asked_with(run, **CASES[case])
    if backend == "sdpa" and asked.sinks is not None and not asked.softcap:
        pytest.skip("sdpa has no sinks")
    inputs = [tensor for tensor in (*asked[:3], asked.sinks) if tensor is not None]
    ours, theirs = attention._BY_BACKEND[backend](run, asked), plain(run, asked)
    probe = torch.randn_like(theirs)
    pairs = [(ours, theirs), *zip(torch.autograd.grad((ours * probe).sum(), inputs), torch.autograd.grad((theirs * probe).sum(), inputs))]
    for mine, other in pairs:
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", ["narrow values", "chunks", "softcap", "softcap and window"])
def test_flex_attention_forward(case):
    torch.manual_seed(seed_of(0))
    run = TreeRun(layout_of(random_rows(1)), torch.device("cpu"), "flex")
    asked = asked_with(run, **CASES[case])
    asked = asked._replace(**{name: getattr(asked, name).detach() for name in ("query", "key", "value")})
    with torch.no_grad():
        torch.testing.assert_close(attention._BY_BACKEND["flex"](run, asked), plain(run, asked), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_chunks_are_a_forest(seed):
    """In the new order, a token's subtree is what its chunk holds of the old one."""
    rng, rows = random.Random(seed_of(seed)), random_rows(seed)
    run, size = TreeRun(layout_of(rows), torch.device("cpu"), "espalier"), rng.randrange(1, 6)
    print(f"rows {rows}, chunks of {size}")
    chunks = Chunks(run.subtree_end, run.position, size)
    order, position, ends = chunks.order.tolist(), run.position.tolist(), run.subtree_end.tolist()
    assert [order[place] for place in chunks.rank.tolist()] == list(range(run.num_tokens))
    for place, token in enumerate(order):
        inside = {order[other] for other in range(place, int(chunks.subtree_end[place]))}
        assert inside == {other for other in range(token, ends[token]) if position[other] // size == position[token] // size}


def wrong(kind, rows):
    """The error of a patched model of a kind, whole and in pieces, whatever its proof would say."""
    theirs = alone(make(kind), rows)
    with pytest.MonkeyPatch.context() as unproven:
        unproven.setattr(proof, "check_family", lambda *_: None)
        model = patch(make(kind))
        with InFloat64():
            whole = worst_error(sums_of(model, [padded(rows)]), theirs)
        return whole, worst_error(step_sums(make(kind), espalier.plan(espalier.build(rows), token_budget=4)), theirs)


def test_chunks_that_are_not_kept(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(attention, "_chunk_of", lambda *_: 0)
    assert min(wrong("llama4_text", random_rows(2))) > 1e-4


def test_temperatures_by_numbers_of_rows(monkeypatch):
    """Negative control: what layers of llama4 without rope have scaled is taken as it is."""
    monkeypatch.setattr(attention, "_at_positions", lambda _module, _run, query: query)
    assert min(wrong("llama4_text", random_rows(2))) > 1e-4


def test_context_of_other_chunks(monkeypatch):
    """Negative control: blocks of context are not cut where chunks end."""
    monkeypatch.setattr(Chunks, "context", lambda self, given: given)
    whole, in_pieces = wrong("llama4_text", random_rows(2))
    assert whole <= EXACT and in_pieces > 1e-4


def test_a_softcap_that_is_left_out(monkeypatch):
    """Negative control."""
    by_espalier = attention._by_espalier
    monkeypatch.setitem(attention._BY_BACKEND, "espalier", lambda run, asked: by_espalier(run, asked._replace(softcap=0.0)))
    assert min(wrong("gemma2", random_rows(2))) > 1e-4


def test_convolutions_that_do_not_branch(monkeypatch):
    """Negative control: pieces begin with zeros."""
    inherited = espalier.hf.context.ContextRun.inherited
    monkeypatch.setattr(espalier.hf.context.ContextRun, "inherited",
                        lambda run, name: None if (found := inherited(run, name)) is None else torch.zeros_like(found))  # fmt: skip
    assert wrong("lfm2", random_rows(2))[1] > 1e-4


def test_layers_that_are_told_by_hooks():
    """They leave nothing behind, and are there once, in copies as well."""
    model = make("stablelm")
    before = [len(module._forward_pre_hooks) for module in model.modules()]
    patch(patch(model))
    layer = copy.deepcopy(model).model.layers[0]
    assert list(layer._forward_pre_hooks.values()) == [told._tell]
    model.gradient_checkpointing_enable()
    sums_of(model, [padded(random_rows(0))])
    assert model.model.layers[0]._gradient_checkpointing_func.func is torch.utils.checkpoint.checkpoint
    assert told.run_of_layer() is None
    unpatch(model)
    assert [len(module._forward_pre_hooks) for module in model.modules()] == before


def test_layers_that_hand_the_forest_on_have_no_hooks():
    assert all(not layer._forward_pre_hooks for layer in patch(make("gemma2")).model.layers)


def test_a_layer_that_runs_by_itself():
    """Outside of a patched model's forward, there is no forest."""
    model = patch(make("stablelm"))
    with pytest.raises(Unsupported, match="received a forward without a forest"):
        model.model.layers[0].self_attn(torch.zeros(1, 3, 32, dtype=torch.float64), None,
                                        position_embeddings=(torch.ones(1, 3, 2), torch.ones(1, 3, 2)))  # fmt: skip


@pytest.mark.parametrize("kind", ["deepseek_v3", "gemma2", "llama4_text"])
def test_masks_instead_of_the_operator(kind):
    rows = random_rows(1)
    theirs, model = alone(make(kind), rows), patch(make(kind), backend="sdpa")
    with InFloat64():
        assert worst_error(sums_of(model, [padded(rows)]), theirs) <= EXACT


@pytest.mark.parametrize("kind", ["deepseek_v3", "gemma2", "llama4_text", "lfm2"])
def test_verification_in_float32(kind):
    """By the ratio of errors."""
    assert espalier.hf.verify(make(kind).float(), padded(random_rows(1))).passed


def keeping_to_themselves(monkeypatch):
    """Layers of lfm2 as older versions have them: the convolution is handed nothing of the forest."""
    layer = sys.modules[type(make("lfm2")).__module__].Lfm2ShortConv
    stock = layer.forward
    monkeypatch.setattr(layer, "forward", lambda module, hidden_states, **_: stock(module, hidden_states))


def test_mixers_that_are_handed_no_forest(monkeypatch):
    keeping_to_themselves(monkeypatch)
    rows = random_rows(2)
    assert max(errors := wrong("lfm2", rows)) <= EXACT, errors
    model = patch(make("lfm2"))
    theirs = sums_of(model, [padded(rows)])
    model.gradient_checkpointing_enable()
    assert worst_error(sums_of(model, [padded(rows)]), theirs) <= EXACT


def test_mixers_that_nobody_tells(monkeypatch):
    """Negative control."""
    keeping_to_themselves(monkeypatch)
    monkeypatch.setattr(patching.told, "attach", lambda *_, **__: False)
    with pytest.raises(Unsupported, match="differs: layers.0.conv"):
        patch(make("lfm2"))


def test_convolutions_that_are_modules():
    """As layers of older versions call them, which cut off what is behind the tokens."""
    torch.manual_seed(seed_of(0))
    rows = random_rows(0)
    forest = espalier.build(rows)
    layout, layer = forest.layout(), torch.nn.Conv1d(4, 4, 3, groups=4, padding=2).double()
    assert older_mixers._is_causal_convolution(layer) and not older_mixers._is_causal_convolution(torch.nn.Conv1d(4, 4, 3, padding=2))
    tokens = torch.randn(1, 4, layout.num_tokens, dtype=torch.float64)
    paths = [torch.as_tensor(layout.path(number)).long() for number in range(len(rows))]
    expected = [layer(tokens[..., path])[..., :len(path)] for path in paths]
    layer.register_forward_hook(older_mixers._convolved)
    with told.of_layer(TreeRun(layout, torch.device("cpu"), "espalier")):
        found = layer(tokens)
    assert found.shape[-1] == layout.num_tokens + 2
    for path, row in zip(paths, expected):
        torch.testing.assert_close(found[..., path], row)
    assert torch.equal(layer(tokens[..., paths[0]])[..., :len(paths[0])], expected[0])
