# SPDX-License-Identifier: Apache-2.0
"""Models whose attention, layers and backbone other libraries have replaced as Unsloth does where it finds a GPU: forwards on classes,
classes in compiled modules, the attention function, gradient checkpointing. The code here has the shape of theirs, in modules of their
names; Unsloth itself does not run on a machine without a GPU."""

import contextlib
import functools
import types

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear
from transformers import modeling_utils
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from espalier.errors import Unsupported
from espalier.hf import changes, families, patch, patching, proof, sharing, tokenwise, verify
from espalier.hf.families import backbone_of
from espalier.hf.float64 import InFloat64
from hf_models import branching_rows, make_model, padded, sums_of, worst_error

EXACT = 1e-11
CURE = "in a process that does not import unsloth, or train it unpatched"
SOURCE = '''
def attention(self, hidden_states, causal_mask=None, attention_mask=None, position_ids=None, past_key_value=None,
              output_attentions=False, use_cache=False, padding_mask=None, position_embeddings=None, *args, **kwargs):
    shape = (*hidden_states.shape[:2], -1, self.head_dim)
    query, key, value = (layer(hidden_states).view(shape) for layer in (self.q_proj, self.k_proj, self.v_proj))
    if hasattr(self, "q_norm"):
        query, key = self.q_norm(query), self.k_norm(key)
    query, key = rotate(query.transpose(1, 2), key.transpose(1, 2), *position_embeddings)
    out = dispatch(query, key, value.transpose(1, 2))
    return self.o_proj(out.transpose(1, 2).flatten(2)), None


def dispatch(query, key, value):
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def layer(self, hidden_states, causal_mask=None, attention_mask=None, position_ids=None, past_key_value=None,
          output_attentions=False, use_cache=False, padding_mask=None, position_embeddings=None, *args, **kwargs):
    normed = self.input_layernorm(hidden_states)
    hidden_states = hidden_states + attention(self.self_attn, normed, position_embeddings=position_embeddings)[0]
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def backbone(self, input_ids=None, causal_mask=None, attention_mask=None, position_ids=None, past_key_values=None,
             inputs_embeds=None, use_cache=None, output_attentions=None, output_hidden_states=None, return_dict=None,
             *args, **kwargs):
    hidden = self.embed_tokens(input_ids)
    if position_ids is None:
        position_ids = torch.arange(input_ids.shape[1])[None]
    rope = self.rotary_emb(hidden, position_ids)
    for each in self.layers:
        hidden = layer(each, hidden, position_embeddings=rope)
    return Output(last_hidden_state=self.norm(hidden))
'''


def forwards_of(home):
    """Forwards that never ask for the forest, as functions of a module that is called `home`."""
    scope = {"__name__": home, "functional": torch.nn.functional, "torch": torch, "rotate": llama.apply_rotary_pos_emb,
             "Output": llama.BaseModelOutputWithPast}  # fmt: skip
    exec(SOURCE, scope)
    return types.SimpleNamespace(**scope)


def replace(monkeypatch, module, family, names, home="unsloth.models.llama"):
    functions = forwards_of(home)
    classes = {"attention": f"{family}Attention", "layer": f"{family}DecoderLayer", "backbone": f"{family}Model"}
    for name in names:
        monkeypatch.setattr(getattr(module, classes[name]), "forward", getattr(functions, name))


def results(model, batch):
    with InFloat64():
        return sums_of(model, [batch])


@pytest.fixture(autouse=True)
def no_verdicts(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(proof, "_verdicts", {})


# Forwards on classes


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("names", "said"),
    [(["attention"], "Qwen3Attention.forward from attention"), (["layer"], "Qwen3DecoderLayer.forward from layer"),
     (["backbone"], "Qwen3Model.forward from backbone"), (["attention", "layer", "backbone"], "Qwen3Model.forward from backbone")],
    ids=["attention", "layer", "backbone", "all"])  # fmt: skip
def test_forwards_that_know_no_forest_are_refused_by_name(names, said, when, monkeypatch):
    """Whatever is replaced, before any batch has run; messages say what to do about Unsloth."""
    model, batch = make_model("qwen3"), padded(branching_rows())
    if when == "after":
        patch(model)
    replace(monkeypatch, qwen3, "Qwen3", names)
    with pytest.raises(Unsupported) as refusal:
        patch(model) if when == "before" else model(**batch)
    assert f"received {said} (unsloth.models.llama)" in str(refusal.value) and str(refusal.value).endswith(CURE)
    assert when == "before" or sharing(model).batches == 0


def test_without_the_refusal_such_forwards_are_wrong(monkeypatch):
    """Negative control of the test above. Where the proof does not see them, calls of attention are missed."""
    model, batch = make_model("qwen3"), padded(branching_rows())
    replace(monkeypatch, qwen3, "Qwen3", ["attention", "layer", "backbone"])
    expected = model(**batch).loss
    monkeypatch.setattr(proof, "_proven", lambda *_: proof.verdicts.Verdict())
    patch(model)
    with pytest.raises(Unsupported, match="each of 2 layers that follows the forest, received none from layers.0.self_attn"):
        model(**batch)
    monkeypatch.setattr(patching, "check_followed", lambda *_: None)
    assert abs(model(**batch).loss - expected) > 1e-3 and sharing(model).ratio > 1.3


def test_refusals_name_a_layer_and_not_its_helpers(monkeypatch):
    functions = forwards_of("other.models")
    functions.attention.__globals__["dispatch"] = forwards_of("helpers").dispatch
    monkeypatch.setattr(llama.LlamaAttention, "forward", functions.attention)
    with pytest.raises(Unsupported, match=r"received LlamaAttention.forward from attention \(other.models\).*train this model unpat"):
        patch(make_model("llama"))


@pytest.mark.parametrize(
    ("text", "is_known"),
    [("LlamaModel.forward from f (unsloth.models.llama)", True), ("the class A from unsloth_compiled_module_llama in layers.0", True),
     ("'sdpa' from g (unsloth_zoo.temporary_patches.misc)", True), ("f (my.unsloth)", False), ("f (test_unsloth)", False),
     ("f (liger_kernel.ops)", False)])  # fmt: skip
def test_cures_go_by_the_module_of_the_code(text, is_known):
    assert changes.cure_of(changes.Change("", text, changes.Role.PATHS), "other").endswith(CURE if is_known else "other")


# Classes in their place


def stand_in(forward=llama.LlamaAttention.forward, stock=llama.LlamaAttention):
    """LlamaAttention as a module with compiled forwards has it: no subclass, of the same name."""

    def init(self, config, layer_idx):
        torch.nn.Module.__init__(self)
        twin = stock(config, layer_idx)
        self.__dict__.update({name: value for name, value in vars(twin).items() if not name.startswith("_")})
        self._modules.update(twin._modules)

    values = {"__init__": init, "forward": forward}
    return type("LlamaAttention", (torch.nn.Module,), values | {"__module__": "unsloth_compiled_module_llama"})


@pytest.mark.parametrize("where", ["class", "object"])
def test_classes_that_pass_on_the_forest_are_proven(where, monkeypatch):
    batch = padded(branching_rows())
    expected = results(make_model("llama"), batch)
    if where == "class":
        monkeypatch.setattr(llama, "LlamaAttention", stand_in())
    model = make_model("llama")
    if where == "object":
        cls = stand_in()
        for number, layer in enumerate(model.model.layers):
            layer.self_attn, weights = cls(model.config, number).double(), layer.self_attn.state_dict()
            layer.self_attn.load_state_dict(weights)
        with pytest.warns(UserWarning, match="is no LlamaAttention"):
            patch(model)
    assert type(model.model.layers[0].self_attn).__module__ == "unsloth_compiled_module_llama"
    assert worst_error(results(patch(model), batch), expected) <= EXACT
    assert sharing(model).ratio > 1.3
    assert list(backbone_of(model)._espalier.attention.values()) == ["layers.0.self_attn", "layers.1.self_attn"]


def test_classes_that_do_not_are_refused(monkeypatch):
    """By patch, also where they call no attention function by the way that is counted."""
    monkeypatch.setattr(llama, "LlamaAttention", stand_in(forwards_of("unsloth_compiled_module_llama").attention))
    with pytest.raises(Unsupported, match="received the class LlamaAttention from unsloth_compiled_module_llama in layers.0.self_attn"
                                          f", with which a small copy is wrong on trees.*{CURE}"):  # fmt: skip
        patch(make_model("llama"))


def test_without_their_place_they_would_be_taken_for_tokenwise(monkeypatch):
    """Negative control of both tests above."""
    monkeypatch.setattr(changes, "_stands_in_for_mixing", lambda *_: False)
    monkeypatch.setattr(llama, "LlamaAttention", stand_in())
    model = patch(make_model("llama"))
    with pytest.raises(Unsupported, match="in layers.0.self_attn: expected a module that takes tokens in any number and order"):
        model(**padded(branching_rows()))


# Functions


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_replaced_attention_function_is_refused_by_name(when, monkeypatch):
    """Also one that only passes on its arguments: it is not known for which lengths and layers it does."""
    table = modeling_utils.ALL_ATTENTION_FUNCTIONS
    stock = table["sdpa"]

    def maybe_banded(module, query, key, value, attention_mask, **more):
        return stock(module, query, key, value, attention_mask, **more)

    function = types.FunctionType(maybe_banded.__code__, {"__name__": "unsloth_zoo.temporary_patches.banded"}, "maybe_banded",
                                  closure=maybe_banded.__closure__)  # fmt: skip
    model, batch = make_model("llama"), padded(branching_rows())
    if when == "after":
        patch(model)(**batch)  # the negative control
    monkeypatch.setitem(table._global_mapping, "sdpa", function)
    with pytest.raises(Unsupported, match=rf"the attention function 'sdpa' from .*banded\); Unsloth replaces.*{CURE}"):
        patch(model) if when == "before" else model(**batch)


# Gradient checkpointing


class Reentrant(torch.autograd.Function):
    """Computes a layer again in the backward pass, in a graph of its own."""

    @staticmethod
    def forward(ctx, function, *args):
        ctx.function, ctx.args = function, [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args]
        with torch.no_grad():
            return function(*args)

    @staticmethod
    def backward(ctx, gradient):
        args = [arg.requires_grad_() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in ctx.args]
        with torch.enable_grad():
            ctx.function(*args).backward(gradient)
        return None, *[arg.grad if isinstance(arg, torch.Tensor) else None for arg in args]


def checkpoint_of_a_library(function, *args, use_reentrant=None, **kwargs):
    """Does not heed use_reentrant."""
    return Reentrant.apply(functools.partial(function, **kwargs), *args)


@pytest.mark.parametrize("when", ["before", "after"])
def test_checkpointing_that_looks_like_that_of_pytorch_is_refused(when, monkeypatch):
    """A library may have replaced PyTorch's function before Espalier was imported, and then takes use_reentrant=False."""
    model, batch = make_model("llama"), padded(branching_rows())
    for module in (torch.utils.checkpoint, modeling_utils, families):
        monkeypatch.setattr(module, "checkpoint", checkpoint_of_a_library, raising=False)
    if when == "after":
        patch(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(Unsupported, match="expected that of PyTorch with use_reentrant=False, received checkpoint_of_a_library from"):
        patch(model) if when == "before" else model(**batch)


def test_a_wrapper_of_checkpointing_is_named_by_its_own_module():
    """functools.wraps copies the module of what it wraps."""

    @functools.wraps(torch.utils.checkpoint.checkpoint)
    def wrapper(*args, **kwargs):
        return checkpoint_of_a_library(*args, **kwargs)

    model = make_model("llama")
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=functools.partial(wrapper, use_reentrant=False))
    with pytest.raises(Unsupported, match="received checkpoint from test_unsloth; undo"):
        patch(model)


def test_checkpointing_of_pytorch_is_taken():
    """Negative control of the test above."""
    model, batch = make_model("llama"), padded(branching_rows())
    expected = sums_of(make_model("llama"), [batch])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert worst_error(sums_of(patch(model), [batch]), expected) <= 1e-6


# Adapters


def test_a_replaced_forward_of_lora_on_the_head_runs_for_every_row(monkeypatch):
    """Where it may look at a batch."""

    def forward(self, hidden, *_args, **_kwargs):
        return self.base_layer(hidden) / (1 + hidden.norm())

    def tuned():
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False, task_type="CAUSAL_LM")
        return get_peft_model(make_model("llama"), config).double().train()

    rows = [[50, 51, 52, 53], [50, 51, 54, 55]]
    batch = padded(rows)
    batch["labels"] = batch["input_ids"].clone()
    monkeypatch.setattr(LoraLinear, "forward", forward)
    expected = tuned()(**batch).loss
    model = patch(tuned())
    assert abs(model(**batch).loss - expected) <= EXACT
    monkeypatch.setattr("espalier.hf.around.home_of", lambda _: "peft.")  # negative control
    assert abs(patch(tuned())(**batch).loss - expected) > 1e-6


# MLPs in tiles


class Tiled(torch.autograd.Function):
    """Runs an MLP on one half of the tokens after the other, and its backward inside of its own, which adds to parameters."""

    @staticmethod
    def forward(ctx, mlp, hidden):
        ctx.mlp, ctx.hidden = mlp, hidden.detach()
        with torch.no_grad():
            return torch.cat([mlp(tile) for tile in hidden.flatten(0, -2).chunk(2)]).view(hidden.shape)

    @staticmethod
    def backward(ctx, gradient):
        found = []
        tiles = ctx.hidden.flatten(0, -2).chunk(2), gradient.flatten(0, -2).chunk(2)
        for tile, own in zip(*tiles, strict=True):
            leaf = tile.detach().requires_grad_()
            with torch.enable_grad():
                torch.autograd.backward(ctx.mlp(leaf), own)
            found.append(leaf.grad)
        return None, torch.cat(found).view(gradient.shape)


def in_tiles(stock):
    return lambda self, hidden: Tiled.apply(functools.partial(stock, self), hidden)


@pytest.mark.parametrize("when", ["look", "proof", "verify"])
def test_gradients_of_earlier_steps_are_left_alone(when, monkeypatch):
    """By tests and proofs that run on the model itself, whose functions add to them."""
    model, batch = make_model("llama"), padded(branching_rows())
    monkeypatch.setattr(llama.LlamaMLP, "forward", in_tiles(llama.LlamaMLP.forward))
    model.model.layers[0].mlp.down_proj.weight.grad = before = torch.ones_like(model.model.layers[0].mlp.down_proj.weight)
    if when == "proof":
        attention = model.model.layers[0].self_attn
        attention.forward = functools.partial(llama.LlamaAttention.forward, attention)  # of which there is no small copy
        with pytest.warns(UserWarning, match="proven on the model itself"):
            patch(model)
    elif when == "look":
        patch(model)(**batch)
    else:
        assert verify(patch(model), batch).passed
    assert all(parameter.grad is None or parameter.grad is before for parameter in model.parameters())
    assert torch.equal(before, torch.ones_like(before))


def test_without_care_a_look_would_add_to_gradients(monkeypatch):
    """Negative control of the test above."""
    monkeypatch.setattr(tokenwise, "without_gradients", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(tokenwise, "whole_gradient", lambda leaf, gradient: torch.zeros_like(leaf) if gradient is None else gradient)
    model = make_model("llama")
    monkeypatch.setattr(llama.LlamaMLP, "forward", in_tiles(llama.LlamaMLP.forward))
    patch(model)(**padded(branching_rows()))
    assert any(parameter.grad is not None for parameter in model.parameters())


def test_gradients_that_a_backward_adds_are_tested(monkeypatch):
    """Those of an MLP in tiles are exact; one that scales them by the number of tokens is refused."""
    model, batch, stock = patch(make_model("llama")), padded(branching_rows()), llama.LlamaMLP.forward
    monkeypatch.setattr(llama.LlamaMLP, "forward", in_tiles(stock))
    twin = make_model("llama")
    twin(**batch).loss.backward()
    model(**batch).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, twin.get_parameter(name).grad, rtol=1e-6, atol=1e-6)

    class Scaled(Tiled):
        @staticmethod
        def backward(ctx, gradient):
            _, result = Tiled.backward(ctx, gradient * ctx.hidden.shape[-2])
            return None, result / ctx.hidden.shape[-2]

    monkeypatch.setattr(llama.LlamaMLP, "forward", lambda self, hidden: Scaled.apply(functools.partial(stock, self), hidden))
    with pytest.raises(Unsupported, match="expected results of each token alone, received some that depend on the other tokens"):
        model(**batch)
