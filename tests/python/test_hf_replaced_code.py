# SPDX-License-Identifier: Apache-2.0
"""Proofs and tests of a patched model whose code others have replaced; test_hf_changes.py has random changes."""

import contextlib
import copy
import functools
import json
import re
import sys
import types
import warnings

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention, Olmo2MLP

from espalier import kept
from espalier.errors import Unsupported
from espalier.hf import patch, patching, proof, sharing, tokenwise, unpatch, verify
from espalier.hf.families import backbone_of
from espalier.hf.float64 import InFloat64, OnCpu
from espalier.hf.small_copy import small_config
from hf_default_models import default_model
from hf_models import HookOfEspalier, branching_rows, make_model, packed, padded, sums_of, worst_error

EXACT = 1e-11


@pytest.fixture(autouse=True)
def no_verdicts(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(proof, "_verdicts", {})


def forget():
    """As in another process."""
    proof._verdicts.clear()


def without_trees(self, hidden_states, position_embeddings, *_args, **_kwargs):
    """Causal attention, as a library may put it in the place of LlamaAttention.forward."""
    shape = (*hidden_states.shape[:2], -1, self.head_dim)
    query, key, value = (layer(hidden_states).view(shape).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return self.o_proj(out.transpose(1, 2).flatten(2)), None


def scaled(stock, by):
    @functools.wraps(stock)
    def forward(self, *args, **kwargs):
        output = stock(self, *args, **kwargs)
        return (output[0] * by, *output[1:]) if isinstance(output, tuple) else output * by

    return forward


def mixing(stock):
    """Adds the mean of what it is called with."""

    def forward(self, hidden):
        return stock(self, hidden + 0.3 * hidden.mean((0, 1)))

    return forward


def results(model, batch):
    with InFloat64():
        return sums_of(model, [batch])


def assert_as_unpatched(model, expected, batch):
    assert worst_error(results(model, batch), expected) <= EXACT


def unpatched(model, batch):
    return results(copy.deepcopy(model), batch)


def olmo2():
    """A family that a proof decides on."""
    return AutoModelForCausalLM.from_config(small_config(default_model("olmo2").config, [0, 1])).double()


# Verdicts


def test_a_verdict_holds_for_the_code_that_ran(monkeypatch):
    """Neither does changed code take the verdict on Transformers' own, nor the other way round."""
    patch(olmo2())
    forget()
    with monkeypatch.context() as changed:
        changed.setattr(Olmo2Attention, "forward", without_trees)
        with pytest.raises(Unsupported, match="received Olmo2Attention.forward from without_trees .*, with which a small copy"):
            patch(olmo2())
        forget()
        with pytest.raises(Unsupported, match="without_trees"):
            patch(olmo2())
    forget()
    patch(olmo2())
    assert len(list(kept.folder("proofs").glob("olmo2-*.json"))) == 2


def test_functions_that_depend_on_unknown_objects_have_no_verdict_on_disk(monkeypatch):
    class Factor:
        value = 2.0

    factor, stock = Factor(), Olmo2Attention.forward

    def forward(self, *args, **kwargs):
        output, weights = stock(self, *args, **kwargs)
        return output * factor.value, weights

    monkeypatch.setattr(Olmo2Attention, "forward", forward)
    model, batch = olmo2(), padded(branching_rows())
    batch["labels"] = torch.where(batch["labels"] < 0, -100, batch["labels"] % 48)
    batch["input_ids"] %= 48
    expected = unpatched(model, batch)
    assert_as_unpatched(patch(model), expected, batch)
    assert not list(kept.folder("proofs").glob("*.json"))


def test_code_is_proven_once(monkeypatch):
    """Also where no verdict is kept, and the mode of training changes."""
    model, batch, proofs, stock = make_model("llama"), padded(branching_rows()), [], LlamaAttention.forward
    monkeypatch.setattr(proof, "_proven", lambda *args: proofs.append(None) or proof.verdicts.Verdict())
    monkeypatch.setattr(proof.verdicts, "key_of", lambda *_: None)
    monkeypatch.setattr(LlamaAttention, "forward", scaled(stock, 0.7))
    patch(model)
    for is_training in (True, False, True, False):
        model.train(is_training)
        model(**batch)
    assert len(proofs) == 2  # in each mode
    monkeypatch.setattr(LlamaAttention, "forward", scaled(stock, 0.8))
    model(**batch)
    assert len(proofs) == 3


def test_a_failure_that_may_pass_is_not_kept(monkeypatch):
    stock = Olmo2MLP.forward

    def forward(self, hidden):
        raise RuntimeError("0 active drivers")

    with monkeypatch.context() as failing:
        failing.setattr(proof, "error_of", lambda *_: forward(None, None))
        with pytest.raises(Unsupported, match="a small copy fails: RuntimeError: 0 active drivers"):
            patch(olmo2())
    assert not list(kept.folder("proofs").glob("*.json")) and Olmo2MLP.forward is stock
    patch(olmo2())
    (file,) = kept.folder("proofs").glob("*.json")
    assert json.loads(file.read_text()) == {"fault": None, "reference": "a small copy in float64"}


# Forwards, classes and functions


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("where", ["class", "object"])
def test_attention_that_ignores_trees_is_refused(where, when, monkeypatch):
    model, batch = make_model("llama"), padded(branching_rows())

    def change():
        if where == "class":
            monkeypatch.setattr(LlamaAttention, "forward", without_trees)
        else:
            for layer in model.model.layers:
                layer.self_attn.forward = without_trees.__get__(layer.self_attn)

    if when == "after":
        patch(model)
        model(**batch)
    change()
    for _ in range(2):
        with pytest.raises(Unsupported, match=r"without_trees \(test_hf_replaced_code\) in layers.0.self_attn, with which a small"):
            patch(model) if when == "before" else model(**batch)


def test_attention_that_passes_on_the_forest_is_proven(monkeypatch):
    model, batch = make_model("llama"), padded(branching_rows())
    monkeypatch.setattr(LlamaAttention, "forward", scaled(LlamaAttention.forward, 1.3))
    expected = unpatched(model, batch)
    assert_as_unpatched(patch(model), expected, batch)
    assert sharing(model).ratio > 1.3


def test_one_layer_with_a_method_of_its_own():
    model, batch = make_model("llama"), padded(branching_rows())
    attention = model.model.layers[1].self_attn
    attention.forward = scaled(LlamaAttention.forward, 1.3).__get__(attention)
    copied = copy.deepcopy(model)  # whose method is bound to the first
    copied.model.layers[1].self_attn.forward = scaled(LlamaAttention.forward, 1.3).__get__(copied.model.layers[1].self_attn)
    assert_as_unpatched(patch(model), results(copied, batch), batch)
    assert sharing(model).ratio > 1.3


def test_the_forward_of_another_class_of_transformers_is_a_replacement():
    model = make_model("llama")
    attention = model.model.layers[0].self_attn
    name = re.escape(BertSelfAttention.forward.__code__.co_qualname)  # in some versions that of a decorator
    attention.forward = BertSelfAttention.forward.__get__(attention)
    with pytest.raises(Unsupported, match=f"received a forward from {name} .* in layers.0.self_attn"):
        patch(model)


def test_a_closure_is_proven_on_the_model_itself():
    model, batch = make_model("llama"), padded(branching_rows())
    attention = model.model.layers[0].self_attn
    attention.forward = functools.partial(scaled(LlamaAttention.forward, 1.3), attention)
    expected = results(model, batch)
    with pytest.warns(UserWarning, match="LlamaModel is proven on the model itself in float64.*is no method of its module"):
        patch(model)
    assert_as_unpatched(model, expected, batch)
    unpatch(model)
    attention.forward = functools.partial(without_trees, attention)
    with pytest.raises(Unsupported, match="and the model itself is wrong on trees, by .*, where rounding explains"):
        patch(model)


@pytest.mark.parametrize("cls", [LlamaMLP, LlamaRMSNorm])
def test_modules_that_take_tokens_one_at_a_time(cls, monkeypatch):
    model, batch = make_model("llama"), padded(branching_rows())
    patch(model)
    stock = cls.forward
    monkeypatch.setattr(cls, "forward", scaled(stock, 0.7))
    twin = unpatch(copy.deepcopy(model))
    assert_as_unpatched(model, results(twin, batch), batch)
    assert sharing(model).ratio > 1.3
    monkeypatch.setattr(cls, "forward", mixing(stock))
    with pytest.raises(Unsupported, match="mixing.*expected results of each token alone, received some that depend on the other"):
        model(**batch)


class Mixing(torch.nn.Module):
    """Adds `share` of the mean over a batch to its input; `keeps` something beside its output."""

    def __init__(self, share=0.0, keeps=False):
        super().__init__()
        self.share, self.keeps = share, keeps

    def forward(self, hidden):
        if self.keeps:
            self.mean = hidden.mean()
        return 0.5 * hidden + self.share * hidden.mean((0, 1))


def with_kernels(model, norm):
    """As `use_kernels` of Transformers leaves a model: each layer that a kernel may replace has a forward set on it, that of the
    kernel (norm: for norms) or, where the Hub has none for the device, that of its own class."""
    for part in model.modules():
        if type(part) in (LlamaRMSNorm, LlamaMLP, LlamaAttention):
            part.forward = types.MethodType(norm if type(part) is LlamaRMSNorm else type(part).forward, part)
    model._use_kernels = True
    return model


def norm_kernel(self, hidden_states):
    return torch.nn.functional.rms_norm(hidden_states, hidden_states.shape[-1:], self.weight, self.variance_epsilon)


@pytest.mark.parametrize("when", ["before", "after"])
def test_kernels_of_the_hub(when):
    """Negative control: one that looks at other tokens is refused by its name."""
    batch = padded(branching_rows())
    model = with_kernels(make_model("llama"), norm_kernel)
    expected = unpatched(model, batch)
    if when == "before":
        assert_as_unpatched(patch(model), expected, batch)
    else:
        model = patch(make_model("llama"))
        assert_as_unpatched(with_kernels(model, norm_kernel), expected, batch)
    assert sharing(model).ratio > 1.3
    with_kernels(model, mixing(norm_kernel))
    with pytest.raises(Unsupported, match="mixing"):
        results(model, batch)


def with_mixing(*modules):
    model = make_model("llama")
    for layer, module in zip(model.model.layers, modules):
        layer.mlp = module.double()
    return patch(model)


def test_settings_of_modules_count():
    """Of each layer, and when they change later."""
    batch = padded(branching_rows())
    with pytest.raises(Unsupported, match="Mixing .* in layers.1.mlp: expected results of each token alone"):
        with_mixing(Mixing(), Mixing(0.3))(**batch)
    model = with_mixing(Mixing(), Mixing())
    model(**batch)
    model.model.layers[0].mlp.share = 0.3
    with pytest.raises(Unsupported, match="Mixing .* in layers.0.mlp: expected results of each token alone"):
        model(**batch)
    with pytest.raises(Unsupported, match="expected results in its output alone, received mean beside it"):
        with_mixing(Mixing(keeps=True))(**batch)


def test_a_module_that_drops_tokens_above_a_capacity(monkeypatch):
    model, batch, stock = patch(make_model("llama")), padded(branching_rows()), LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: stock(self, x) * (x.shape[:-1].numel() <= 100))
    with pytest.raises(Unsupported, match="expected results of each token alone, received some that depend on the other"):
        model(**batch)


def test_a_wrapper_that_copies_attributes_of_the_patch():
    """functools.wraps copies also what the patch keeps at its forward."""
    model, batch = make_model("llama"), padded(branching_rows())

    def normed(module):
        stock = module.forward

        @functools.wraps(stock)
        def forward(*args, **kwargs):
            output = stock(*args, **kwargs)
            output.logits = output.logits / output.logits.norm()
            return output

        module.forward = forward
        return module

    theirs = normed(copy.deepcopy(model))
    ours = normed(patch(model))
    with pytest.warns(UserWarning, match="a forward of LlamaForCausalLM from test_hf_replaced_code may look at rows"), InFloat64():
        torch.testing.assert_close(ours(**batch).logits, theirs(**batch).logits)


def test_functions_that_call_what_they_replace_run_once(monkeypatch):
    """Modes of PyTorch call functions of torch.nn.functional by the names that they have there."""
    calls, stock = [], torch.nn.functional.embedding

    def embedding(*args, **kwargs):
        calls.append(None)
        return stock(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "embedding", embedding)
    for modes, count in (([], 1), ([InFloat64(), OnCpu()], 1), ([torch.device("cpu")], 2)):  # the last: a negative control
        calls.clear()
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            torch.nn.Embedding(3, 4)(torch.tensor([1]))
        assert len(calls) == count


def test_looks_leave_embeddings_as_they_are(monkeypatch):
    """Where batches run unshared; max_norm changes the weights of tokens that a forward pass looks up."""
    batch = packed([[50, 51, 52, 53], [50, 51, 54]])
    model = patch(make_model("qwen3"))
    embedding = model.get_input_embeddings()
    embedding.max_norm = 0.1
    before = embedding.weight.detach().clone()
    with pytest.warns(UserWarning, match="max_norm=0.1 in embed_tokens may look at rows"):
        model(**batch)
    seen = (embedding.weight != before).any(1).nonzero().flatten().tolist()
    assert seen == sorted(set(batch["input_ids"].flatten().tolist()))
    monkeypatch.setattr(tokenwise, "without_renorm", contextlib.nullcontext)  # negative control
    model(**batch)
    assert (embedding.weight != before).any(1).sum() > len(seen)


def test_positions_at_padding_are_no_restarts():
    model, batch = make_model("gpt_oss"), padded(branching_rows())
    batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    theirs = unpatched(model, batch)
    patch(model).model.layers[0].mlp.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="batches run unshared"):
        assert_as_unpatched(model, theirs, batch)
    with pytest.raises(Unsupported, match="packed rows: expected a model that keeps them apart"):
        model(**packed(branching_rows()))


def test_modules_of_pytorch_that_mix_tokens():
    model, batch = make_model("llama"), padded(branching_rows())
    model.model.layers[0].mlp.act_fn = torch.nn.Softmax(1)
    with pytest.raises(Unsupported, match="the class Softmax .* in layers.0.mlp.act_fn: expected results of each token alone"):
        patch(model)(**batch)


def test_windows_that_masks_do_not_know():
    batch = padded(branching_rows())
    for change in (lambda model: model.model.layers.insert(0, model.model.layers.pop(-1)),
                   lambda model: setattr(model.model.layers[0].self_attn, "sliding_window", None)):  # fmt: skip
        model = patch(make_model("gpt_oss"))
        model(**batch)
        change(model)
        with pytest.raises(Unsupported, match="sliding_window=.*, where masks are made for"):
            model(**batch)


def test_forwards_that_are_no_functions(monkeypatch):
    model, batch = patch(make_model("llama")), padded(branching_rows())
    monkeypatch.setattr(LlamaMLP, "forward", functools.partialmethod(mixing(LlamaMLP.forward)))
    with pytest.raises(Unsupported, match="LlamaMLP.forward from partialmethod"):
        model(**batch)


def test_what_depends_on_the_batch_unpatched_is_no_proof(monkeypatch):
    """A factor by the number of rows: rows alone and a tree have one."""
    stock = LlamaAttention.forward

    def by_rows(self, hidden_states, *args, **kwargs):
        output, weights = stock(self, hidden_states, *args, **kwargs)
        return output * len(hidden_states), weights

    monkeypatch.setattr(LlamaAttention, "forward", by_rows)
    with pytest.raises(Unsupported, match="a small copy, unpatched, gives rows other results in a batch than alone"):
        patch(make_model("llama"))


def test_attention_functions_of_users():
    AttentionInterface.register("sharper", functools.partial(sharper))
    AttentionInterface.register("library", functools.partial(sdpa_attention_forward))
    model = make_model("llama")
    model.config._attn_implementation = "library"
    patch(copy.deepcopy(model))
    model.config._attn_implementation = "sharper"
    with pytest.raises(Unsupported, match="received the attention function 'sharper' from sharper"):
        patch(model)
    model.config._attn_implementation = "sdpa"
    patch(model)
    model.set_attn_implementation("sharper")
    with pytest.raises(Unsupported, match="received the attention function 'sharper' from sharper"):
        model(**padded(branching_rows()))


def sharper(module, query, key, value, attention_mask, scaling=None, **more):
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=2 * module.scaling, **more)


def test_bidirectional_attention_is_refused():
    model = patch(make_model("llama"))
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(Unsupported, match="is_causal=False in layers.1.self_attn"):
        model(**padded(branching_rows()))


def test_every_call_of_attention_is_counted(monkeypatch):
    """Code that the look does not see, and a negative control without the count."""
    model, batch = patch(make_model("llama")), padded(branching_rows())
    expected = model(**batch).loss
    forward = LlamaAttention.forward
    monkeypatch.setattr(patching.Patch, "look", lambda *_: None)
    backbone_of(model)._espalier.is_on_trial = False
    LlamaAttention.forward = without_trees
    try:
        with pytest.raises(Unsupported, match="each of 2 layers that follows the forest, received none from layers.0.self_attn"):
            model(**batch)
        backbone_of(model)._espalier.attention = {}
        assert abs(model(**batch).loss - expected) > 1e-3
    finally:
        LlamaAttention.forward = forward


# Hooks


def test_unknown_hooks_see_rows():
    model, batch, seen = patch(make_model("llama")), padded(branching_rows()), []

    def hook(_module, _args, output):
        seen.append(output.shape)
        output[:, 3] *= 2

    twin = unpatch(copy.deepcopy(model))
    handles = [each.model.layers[0].mlp.register_forward_hook(hook) for each in (twin, model)]
    expected = results(twin, batch)
    with pytest.warns(UserWarning, match=r"run unshared, as they would unpatched: a hook, .*hook \(test_hf_replaced_code\), in lay"):
        assert_as_unpatched(model, expected, batch)
    assert seen[0] == seen[1] and sharing(model).batches == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        model(**batch)
    assert verify(model, batch).passed
    for handle in handles:
        handle.remove()
    assert_as_unpatched(model, results(twin, batch), batch)
    assert sharing(model).batches > 0


def test_backward_passes_that_compute_hooked_layers_again():
    model, batch = make_model("llama"), padded(branching_rows())
    model.model.layers[0].mlp.register_forward_hook(lambda _module, _args, output: output * 2)
    expected = sums_of(copy.deepcopy(model), [batch])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.warns(UserWarning, match="run unshared"):
        assert worst_error(sums_of(patch(model), [batch]), expected) <= 1e-6


def test_packed_rows_that_the_model_mixes_are_refused():
    """Unpatched, gpt-oss lets packed rows see each other."""
    for kind, is_apart in (("llama", True), ("gpt_oss", False)):
        model = patch(make_model(kind))
        model.model.layers[0].mlp.register_forward_hook(lambda _module, _args, output: output)
        with pytest.warns(UserWarning, match="run unshared"):
            if is_apart:
                model(**packed(branching_rows()))
                continue
            with pytest.raises(Unsupported, match="packed rows: expected a model that keeps them apart where batches run unsh"):
                model(**packed(branching_rows()))


def test_hooks_of_known_libraries_stay_shared():
    accelerate = pytest.importorskip("accelerate.hooks")
    model, batch = make_model("llama"), padded(branching_rows())
    expected = unpatched(model, batch)
    patch(model)
    model.enable_input_require_grads()
    model.model.layers[0].mlp.register_forward_hook(HookOfEspalier(lambda *_: None))
    for module in model.model.modules():
        if not isinstance(module, torch.nn.ModuleList) and module is not model.model:
            accelerate.add_hook_to_module(module, accelerate.ModelHook())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_as_unpatched(model, expected, batch)
    assert sharing(model).ratio > 1.3


def test_transforms_of_torch_func_run_unshared():
    model, batch = make_model("llama"), padded(branching_rows())
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(weights):
        return torch.func.functional_call(model, weights, (), batch).loss

    expected = torch.func.grad(loss)(weights)
    patch(model)
    received = torch.func.grad(loss)(weights)
    assert all(torch.equal(received[name], expected[name]) for name in expected)


# Layers without float64


class OnlyFloat32(torch.nn.Module):
    """As kernels of other libraries say it."""

    def forward(self, hidden):
        return hidden * {torch.float32: 1.5}[hidden.dtype]


def test_layers_that_know_no_float64_are_verified_against_noise(monkeypatch):
    model, batch = make_model("llama", torch.float32), padded(branching_rows())
    model.model.layers[0].mlp = OnlyFloat32()
    report = verify(model, batch)
    assert report.passed and report.no_float64 == "KeyError: torch.float64" and "no layers in float64: KeyError" in str(report)
    init = patching.TreeRun.__init__

    def shifted(run, *arguments):  # negative control
        init(run, *arguments)
        run.position = run.position + (run.position > 4)

    monkeypatch.setattr(patching.TreeRun, "__init__", shifted)
    assert not verify(model, batch).passed


def test_the_modules_that_tests_replace_are_whole():
    assert sys.modules[LlamaAttention.__module__].LlamaAttention.forward.__qualname__ == "LlamaAttention.forward"
