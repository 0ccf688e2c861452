# SPDX-License-Identifier: Apache-2.0
"""Logits that a patched model computes when they are read, after its output layer has changed in all ways; heads of other
forms; losses that other libraries replace."""

import contextlib
import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from transformers.loss import loss_utils

from conftest import seed_of
from espalier.errors import Unsupported
from espalier.hf import around, head_state, patch, shared_head, unpatch
from espalier.hf.argument_names import may_be_read
from espalier.hf.deferred_logits import Deferred
from espalier.hf.float64 import InFloat64
from espalier.hf.origin import is_library_code
from hf_models import KINDS, branching_rows, make_model, packed, padded, worst_error

EXACT = 1e-12
CHANGED = "has changed since the forward pass.*read them before"


def batch_of():
    return padded(branching_rows()) | {"use_cache": False}


def loss_and_gradients(model, batch, compute=InFloat64, **more):
    with compute():
        loss = model(**batch, **more).loss
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return loss.item(), dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)))


def error_of(found, expected, batch):
    """Of logits, relative, where tokens are."""
    inside = batch["attention_mask"].bool()
    return ((found - expected)[inside].norm() / expected[inside].norm()).item()


class InPlace(torch.optim.Optimizer):
    """One that writes to memory as kernels do, without new versions of the tensors."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"])


OPTIMIZERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1),
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "in place": InPlace,
}


@pytest.fixture
def no_copies(monkeypatch):
    """Negative control: nothing is kept before a step."""
    monkeypatch.setattr(head_state.HeadState, "before_step", lambda *_: None)


def logits_around_a_step(model, make_optimizer, batch):
    """(logits of an unpatched copy, those that a patched model gives after a step)."""
    model = patch(model)
    optimizer = make_optimizer(model.parameters())
    with InFloat64():
        expected = unpatch(copy.deepcopy(model))(**batch).logits.detach()
        output = model(**batch)
    output.loss.backward()
    optimizer.step()
    with InFloat64():
        return expected, output.logits


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["qwen3", "mamba2", "granitemoehybrid", "gpt_oss"])
def test_after_a_step(kind, name):
    """They are those of the forward pass, of a copy of the layer, and have no graph."""
    batch = batch_of()
    expected, found = logits_around_a_step(make_model(kind), OPTIMIZERS[name], batch)
    assert error_of(found, expected, batch) <= EXACT and not found.requires_grad and found.dtype == expected.dtype


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_after_a_step_without_a_copy(name, no_copies):
    with pytest.raises(Unsupported, match=CHANGED):
        logits_around_a_step(make_model("qwen3"), OPTIMIZERS[name], batch_of())


def test_after_a_step_of_a_layer_that_nobody_looks_at(no_copies, monkeypatch):
    """Negative control: the logits are others."""
    monkeypatch.setattr(head_state.HeadState, "_difference", lambda _: None)
    batch = batch_of()
    expected, found = logits_around_a_step(make_model("qwen3"), OPTIMIZERS["SGD"], batch)
    assert error_of(found, expected, batch) > 1e-3


def test_small_steps_in_bfloat16(no_copies):
    """Hardly any value changes; versions do."""
    with pytest.raises(Unsupported, match=CHANGED):
        logits_around_a_step(make_model("qwen3", torch.bfloat16), functools.partial(torch.optim.SGD, lr=1e-9), batch_of())


def test_after_a_compiled_step_of_a_compiled_model():
    model, batch = patch(make_model("qwen3")), batch_of()
    expected = model(**batch).logits.detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output = torch.compile(model, backend="aot_eager")(**batch)
    output.loss.backward()
    torch.compile(optimizer.step, backend="aot_eager")()
    assert error_of(output.logits, expected, batch) <= 1e-6  # torch.compile knows no InFloat64
    assert error_of(model(**batch).logits, expected, batch) > 1e-3


def test_several_outputs_share_a_copy():
    model, batch = patch(make_model("qwen3")), batch_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with InFloat64():
        expected = model(**batch).logits.detach()
        outputs = [model(**batch) for _ in range(3)]
        early = outputs[0].logits.detach()
        states = list(head_state._waiting)
        outputs[1].loss.backward()
        optimizer.step()
        assert len(states) == 2 and all(state.is_copy for state in states)
        assert states[0]._copy.lm_head is states[1]._copy.lm_head is not model.lm_head
        assert all(error_of(found, expected, batch) <= EXACT for found in (early, outputs[1].logits, outputs[2].logits))
        optimizer.step()  # the gradients again
        assert error_of(outputs[2].logits, expected, batch) <= EXACT
        assert error_of(model(**batch).logits, expected, batch) > 1e-3
    del states, outputs
    assert not list(head_state._waiting)


def test_what_does_not_change_the_layer():
    """Backward, steps of other parameters, evaluation, other forward passes: the logits have a graph, as before."""
    model, batch = patch(make_model("qwen3")), batch_of()
    assert not model.config.tie_word_embeddings
    optimizer = torch.optim.SGD([parameter for name, parameter in model.named_parameters() if "lm_head" not in name], lr=0.1)
    with InFloat64():
        expected = model(**batch).logits.detach()
        output = model(**batch)
        output.loss.backward()
        optimizer.step()
        model.eval()
        model(input_ids=batch["input_ids"])
        found = output.logits
    assert error_of(found, expected, batch) <= EXACT and found.requires_grad


def replaced(model):
    model.lm_head = copy.deepcopy(model.lm_head)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)


def with_other_memory(model):
    model.lm_head.weight.data = 1.5 * model.lm_head.weight.data


def loaded(model):
    model.load_state_dict({name: 1.5 * tensor for name, tensor in model.state_dict().items()})


CHANGES = {
    "a new version": lambda model: torch.no_grad()(model.lm_head.weight.mul_)(1.5),
    "its data": lambda model: model.lm_head.weight.data.mul_(1.5),
    "other memory": with_other_memory,
    "a new module": replaced,
    "loaded": loaded,
    "another dtype": lambda model: model.float(),
    "larger": lambda model: model.resize_token_embeddings(70),
    "the embeddings that it is tied to": lambda model: torch.no_grad()(model.model.embed_tokens.weight.mul_)(1.5),
    "a parameter more": lambda model: setattr(model.lm_head, "bias", nn.Parameter(torch.ones(61, dtype=torch.float64))),
    "a hook": lambda model: model.lm_head.register_forward_hook(lambda _module, _args, output: 2 * output),
    "a setting": lambda model: setattr(model.lm_head, "scale", 3.0),
}  # fmt: skip


@pytest.mark.parametrize("has_graph", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_other_changes_are_refused(name, has_graph):
    model = make_model("qwen3")
    if "tied" in name:
        model = make_model("qwen3", tie_word_embeddings=True)
        assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.set_grad_enabled(has_graph):
        output = patch(model)(**batch_of())
    CHANGES[name](model)
    with pytest.raises(Unsupported, match=CHANGED):
        _ = output.logits


def with_adapters(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed_of(3))
    config = peft.LoraConfig(r=3, init_lora_weights=False, target_modules=["lm_head", "q_proj"])
    model = peft.get_peft_model(model, config)
    model.add_adapter("other", config)
    return model.to(torch.float64)


ADAPTERS = {
    "another": lambda model: model.set_adapter("other"),
    "merged": lambda model: model.merge_adapter(),
    "removed": lambda model: model.delete_adapter("default"),
    "scaled": lambda model: model.base_model.model.lm_head.scale_layer(2.0),
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_of_the_output_layer(name):
    model, batch = patch(with_adapters(make_model("llama"))), batch_of()
    with InFloat64():
        expected, output, late = model(**batch).logits.detach(), model(**batch), model(**batch)
        with model.disable_adapter():
            model(**batch)
        assert error_of(output.logits, expected, batch) <= EXACT
        ADAPTERS[name](model)
        with pytest.raises(Unsupported, match=CHANGED):
            _ = late.logits


def test_adapters_of_the_output_layer_after_a_step():
    batch = batch_of()
    torch.manual_seed(seed_of(4))
    model = patch(with_adapters(make_model("llama")))
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    with InFloat64():
        expected, output = model(**batch).logits.detach(), model(**batch)
        output.loss.backward()
        optimizer.step()
        model.set_adapter("other")
        assert error_of(output.logits, expected, batch) <= EXACT
        assert error_of(model(**batch).logits, expected, batch) > 1e-3


class Cast(nn.Module):
    """A head in another dtype, as TRL makes some."""

    def __init__(self, linear, dtype):
        super().__init__()
        self.linear, self.dtype = linear.to(dtype), dtype

    def forward(self, hidden):
        return self.linear(hidden.to(self.dtype))


HEADS = {
    "a cast": lambda linear: Cast(linear, torch.float64),
    "a cast to float32": lambda linear: Cast(linear, torch.float32),
    "a sequence": lambda linear: nn.Sequential(nn.Tanh(), linear),
    "a parametrization": parametrizations.weight_norm,
    "weight_norm": torch.nn.utils.weight_norm,
    "a bias": lambda linear: nn.Linear(32, 61, dtype=torch.float64),
}


@pytest.mark.parametrize("is_labelled", [True, False])
@pytest.mark.parametrize("name", HEADS)
def test_heads_of_other_forms(name, is_labelled):
    torch.manual_seed(seed_of(5))
    model, batch = make_model("qwen3"), batch_of()
    model.set_output_embeddings(HEADS[name](model.lm_head))
    is_cast = name == "a cast to float32"
    most, compute = (1e-5, contextlib.nullcontext) if is_cast else (EXACT, InFloat64)
    with torch.no_grad():
        expected = model(**batch).logits
    theirs = loss_and_gradients(model, batch, compute)
    patch(model)
    assert worst_error(loss_and_gradients(model, batch, compute), theirs) <= most
    if not is_labelled:
        batch.pop("labels")
    output = model(**batch)
    assert error_of(output.logits, expected, batch) <= most and output.logits.dtype == expected.dtype
    if is_labelled and name in ("a sequence", "a bias"):  # others have hooks, or code of their own
        (held,) = (value for value in model(**batch).values() if type(value) is Deferred)
        assert held.dtype == expected.dtype and held.shape == expected.shape


def test_a_head_of_other_forms_after_a_step():
    batch = batch_of()
    model = make_model("qwen3")
    model.set_output_embeddings(parametrizations.weight_norm(model.lm_head))
    expected, found = logits_around_a_step(model, OPTIMIZERS["SGD"], batch)
    assert error_of(found, expected, batch) <= EXACT


def smoothed(real):
    @functools.wraps(real)
    def replacement(*args, **kwargs):
        return real(*args, **kwargs) + 0.1 * next(iter([*args, *kwargs.values()])).double().logsumexp(-1).square().mean()

    return replacement


LOSSES = {
    "cross_entropy": lambda patch_, _: patch_.setattr(nn.functional, "cross_entropy", smoothed(nn.functional.cross_entropy)),
    "fixed_cross_entropy": lambda patch_, _: patch_.setattr(loss_utils, "fixed_cross_entropy",
                                                            smoothed(loss_utils.fixed_cross_entropy)),
    "an entry": lambda patch_, _: patch_.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", smoothed(loss_utils.ForCausalLMLoss)),
    "ForCausalLMLoss": lambda patch_, _: patch_.setattr(loss_utils, "ForCausalLMLoss", smoothed(loss_utils.ForCausalLMLoss)),
    "loss_function": lambda _, model: setattr(model, "loss_function", smoothed(model.loss_function)),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_replaced_losses(name, monkeypatch):
    """A replacement gets the logits of all rows: also one that copies the name and module of what it replaces."""
    model, batch = make_model("qwen3"), packed(branching_rows()) | {"use_cache": False}
    plain = loss_and_gradients(model, batch)
    LOSSES[name](monkeypatch, model)
    theirs = loss_and_gradients(model, batch)
    assert (worst_error(theirs, plain) > 1e-3) == (name != "ForCausalLMLoss")  # which nothing looks up there
    patched = patch(copy.deepcopy(model))
    assert worst_error(loss_and_gradients(patched, batch), theirs) <= EXACT
    if name != "ForCausalLMLoss":
        monkeypatch.setattr(shared_head, "is_library_code", lambda *_: True)  # negative control
        monkeypatch.setattr(around.Around, "_suspects", lambda *_: iter(()))
        assert worst_error(loss_and_gradients(patched, batch), theirs) > 1e-3


class _Spread(torch.autograd.Function):
    """Its input, with a gradient that is spread over all tokens."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad - 0.1 * grad.mean(0, keepdim=True)


def test_a_loss_with_gradients_at_padding(monkeypatch):
    model, batch = make_model("qwen3"), padded(branching_rows())
    stock = loss_utils.fixed_cross_entropy
    monkeypatch.setattr(loss_utils, "fixed_cross_entropy",
                        lambda logits, *args, **kwargs: stock(_Spread.apply(logits), *args, **kwargs))  # fmt: skip
    theirs = loss_and_gradients(model, batch)
    with pytest.warns(UserWarning, match="a loss that looks at logits without labels may look at rows"):
        assert worst_error(loss_and_gradients(patch(model), batch), theirs) <= EXACT


def test_code_of_libraries():
    cross_entropy, loss = nn.functional.cross_entropy, loss_utils.ForCausalLMLoss
    assert is_library_code(cross_entropy, "cross_entropy") and is_library_code(loss, "ForCausalLMLoss")
    assert is_library_code(torch.compile(cross_entropy), "cross_entropy") and is_library_code(nn.functional.linear, "linear")
    assert is_library_code(functools.cache(loss), "ForCausalLMLoss") and is_library_code(make_model("qwen3").forward)
    assert not is_library_code(cross_entropy, "nll_loss") and not is_library_code(smoothed(cross_entropy))
    assert not is_library_code(torch.no_grad()(lambda: None)) and not is_library_code(functools.partial(cross_entropy))
    assert not is_library_code(torch.compile(smoothed(cross_entropy)))


@pytest.fixture
def accelerate():
    """Accelerate with the state of a new process: a process has one precision, and other tests make Accelerators too."""
    module = pytest.importorskip("accelerate")
    states = [module.state.PartialState, module.state.AcceleratorState, module.state.GradientState]
    before = [dict(state._shared_state) for state in states]
    for state in states:
        state._shared_state.clear()
    yield module
    for state, values in zip(states, before, strict=True):
        state._shared_state.clear()
        state._shared_state.update(values)


@pytest.mark.parametrize("is_prepared_first", [True, False])
@pytest.mark.parametrize("kind", ["qwen3", "mamba2"])
def test_a_model_that_accelerate_unwraps(kind, is_prepared_first, accelerate):
    model, batch = make_model(kind, torch.float32), batch_of()
    theirs = model(**batch).loss.item()
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    if is_prepared_first:
        model = patch(accelerator.prepare(model))
    else:
        model = accelerator.prepare(patch(model))
    model(**batch)
    model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    twin = copy.deepcopy(model)
    most = 1e-2 if is_prepared_first and kind == "mamba2" else 1e-5  # whose forward in low precision stays
    assert model(**batch).loss.item() == pytest.approx(theirs, rel=most)
    others = {name: value for name, value in batch.items() if name != "input_ids"}
    assert model(batch["input_ids"], **others).loss == model(**batch).loss
    with torch.no_grad():
        twin.get_output_embeddings().weight.mul_(2)
    assert is_prepared_first or twin(**batch).loss.item() != pytest.approx(theirs, rel=1e-3)  # Accelerate's copy has its model
    unpatch(model)
    assert not isinstance(getattr(model.forward, "__func__", model.forward), shared_head.Head)
    assert model(**batch).loss.item() == pytest.approx(theirs, rel=most)


def test_a_backbone_that_accelerate_unwraps(accelerate):
    backbone, batch = make_model("qwen3", torch.float32).model, batch_of()
    batch.pop("labels")
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    theirs = backbone(**batch).last_hidden_state
    found = accelerator.unwrap_model(accelerator.prepare(patch(backbone)), keep_fp32_wrapper=False)(**batch).last_hidden_state
    assert error_of(found, theirs, batch) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_another_default_device(kind):
    """Stands for torch.set_default_device("cuda"): what the host reads is made on the CPU."""
    model, batch = make_model(kind), batch_of()
    with torch.no_grad(), InFloat64():
        expected = model(**batch).logits
    theirs = loss_and_gradients(model, batch)
    patch(model)
    with torch.device("meta"):
        ours = loss_and_gradients(model, batch)
        batch.pop("labels")
        with InFloat64():
            logits = model(**batch).logits
    assert worst_error(ours, theirs) <= EXACT and error_of(logits, expected, batch) <= EXACT


def test_arguments_that_no_code_reads():
    model, batch = make_model("qwen3"), batch_of()
    theirs = loss_and_gradients(model, batch, margin=torch.ones(9))
    patch(model)
    assert worst_error(loss_and_gradients(model, batch, margin=torch.ones(9)), theirs) <= EXACT
    for name in "token_type_ids", "position_bias", "prompt_ids":  # of tokenizers, of attention, by its end
        with pytest.raises(Unsupported, match=f"{name}: expected none"):
            model(**batch, **{name: torch.ones(9)})


class Reading(nn.Module):
    """A layer that reads an argument as nobody but this file does."""

    def forward(self, hidden, **kwargs):
        return hidden + kwargs.get("strange_argument", 0) + kwargs["odd_" + "one"]


def test_arguments_that_some_code_reads():
    backbone = make_model("qwen3").model
    names = ["strange_argument", "odd_one", "_".join(["unusual", "argument"])]
    assert [may_be_read(backbone, name) for name in names] == [False, False, False]
    backbone.layers[0].mlp.act_fn = Reading()
    assert [may_be_read(backbone, name) for name in names] == [True, True, False]
    backbone.layers[0].mlp.act_fn.forward = eval("lambda hidden: hidden", {"__name__": "of_no_file"})
    assert may_be_read(backbone, names[2])
