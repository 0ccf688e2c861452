# SPDX-License-Identifier: Apache-2.0
"""Changes of the modules of a model by other people's code, drawn at random: forwards, hooks and attributes."""

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_globals

from changed_code import BEHAVIOURS, EXACT_FORWARDS, FORWARDS, OF_GRADIENTS, Behaviour, changed, changed_input

MODELS = ("llama", "qwen3", "qwen3_moe", "qwen3_next", "mamba2", "gpt_oss", "olmo2")
RECURRENT = ("qwen3_next", "mamba2")


def base_of(model):
    """The model of Transformers inside of PEFT."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _all(modules, *names):
    return [getattr(module, name) for module in modules for name in names if isinstance(getattr(module, name, None), nn.Module)]


def modules_of(model, kind):
    """The modules of a model that are of some kind."""
    inner = base_of(model)
    backbone = inner.base_model
    layers = list(backbone.layers)
    attention, mlp = _all(layers, "self_attn"), _all(layers, "mlp")
    mixers = _all(layers, "linear_attn", "mixer")
    linears = [module for module in mlp if hasattr(module, "down_proj")]
    found = {
        "attention": attention,
        "projection": _all(attention, "q_proj", "v_proj", "o_proj"),
        "q_norm": _all(attention, "q_norm"),
        "mlp": mlp,
        "linear of the mlp": _all(linears, "up_proj", "down_proj"),
        "activation": _all(linears, "act_fn"),
        "input norm": _all(layers, "input_layernorm", "norm") or _all(layers, "post_attention_layernorm"),
        "final norm": _all([backbone], "norm", "norm_f"),
        "layer": layers,
        "backbone": [backbone],
        "embedding": [inner.get_input_embeddings()],
        "rotary": _all([backbone], "rotary_emb"),
        "head": [inner.get_output_embeddings()],
        "model": [inner],
        "router": _all(mlp, "gate", "router"),
        "experts": _all(mlp, "experts"),
        "mixer": mixers,
        "convolution": _all(mixers, "conv1d"),
        "gated norm": _all(mixers, "norm"),
    }
    return found[kind]


MODULES = ("attention", "projection", "q_norm", "mlp", "linear of the mlp", "activation", "input norm", "final norm", "layer",
           "backbone", "embedding", "rotary", "head", "model", "router", "experts", "mixer", "convolution",
           "gated norm")  # fmt: skip
DENSE, ROUTED = ("llama", "qwen3", "qwen3_next", "olmo2"), ("qwen3_moe", "qwen3_next", "gpt_oss")
HAVING = {"q_norm": ("qwen3", "qwen3_moe", "qwen3_next", "olmo2"), "router": ROUTED, "experts": ROUTED, "mixer": RECURRENT,
          "convolution": RECURRENT, "gated norm": RECURRENT, "linear of the mlp": DENSE, "activation": DENSE}  # fmt: skip
WITHOUT_MAMBA = tuple(name for name in MODELS if name != "mamba2")
for _kind in ("attention", "projection", "mlp", "rotary"):
    HAVING[_kind] = WITHOUT_MAMBA


class Redraw(Exception):
    """The change says nothing about this model."""


@dataclass
class Change:
    """What is done to a model.

    text       what it is
    install    of a model, makes the change and returns what takes it back
    is_global  of all models at once, so that it is made once
    is_exact   trees are known to be exact with it
    is_noise   draws random numbers for each token
    settings   of the config of all models, from the beginning
    wrap       of a model, gives another that is around it; before install
    """

    text: str
    install: Callable[[Any], Callable[[], Any]]
    is_global: bool = False
    is_exact: bool = False
    is_noise: bool = False
    can_be_removed: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    wrap: Callable[[Any], Any] | None = None


def draw_behaviour(rng, *, backward=None, is_global=False, dim=None):
    backward = rng.random() < 0.15 if backward is None else backward
    names = OF_GRADIENTS if backward else [name for name in BEHAVIOURS if not (is_global and name == "number of calls")]
    amount = rng.choice([-1, 1]) * rng.uniform(0.05, 0.3)
    return Behaviour(rng.choice(names), amount, rng.choice([-3, -1, 0, 1, 5, 9, 12]), dim, backward)


def set_attribute(owner, name, value):
    """Sets an attribute of an object as `owner.name = value` does; returns what takes it back."""
    if isinstance(getattr(type(owner), name, None), property):
        before = getattr(owner, name)
        setattr(owner, name, value)
        return lambda: setattr(owner, name, before)
    is_module = isinstance(owner, nn.Module)
    places = [owner.__dict__, *([owner._parameters, owner._buffers, owner._modules] if is_module else [])]
    place = next((place for place in places if name in place), None)
    if isinstance(owner, (type, types.ModuleType)) or place is None:
        has_one, old = name in vars(owner), vars(owner).get(name)
    else:
        has_one, old = True, place[name]
    if has_one and is_module and not isinstance(value, nn.Module) and name in owner._modules:
        del owner._modules[name]
    setattr(owner, name, value)

    def take_back():
        if not has_one:
            return delattr(owner, name)
        if is_module and isinstance(old, nn.Module):
            owner.__dict__.pop(name, None)
        return setattr(owner, name, old)

    return take_back


def place_of(model, module):
    """(parent, name) of a module in a model."""
    path = next(name for name, each in base_of(model).named_modules() if each is module)
    parent, _, leaf = path.rpartition(".")
    return base_of(model).get_submodule(parent), leaf


class Place:
    """Which module of its kind is changed: the same in each copy of a model."""

    def __init__(self, kind, rng):
        self.kind, self.share = kind, rng.random()

    def of(self, model):
        found = modules_of(model, self.kind)
        return found[int(self.share * len(found))]


def describe(*parts):
    return ", ".join(str(part) for part in parts if part)


# Other code around or instead of forward


def draw_forward(place, rng, is_global=False):
    """(text, make, way, is_exact): make(stock, way) gives a function of (module, *args, **kwargs)."""
    own = FORWARDS.get(place.kind, {})
    if own and rng.random() < 0.4:
        name = rng.choice(list(own))
        return name, lambda stock, way: own[name], Behaviour("nothing", 0.0), name in EXACT_FORWARDS
    way, is_input = draw_behaviour(rng, is_global=is_global), rng.random() < 0.25

    def make(stock, way):
        def forward(self, *args, **kwargs):
            if is_input:
                args, kwargs = changed_input(args, kwargs, way)
                return stock(self, *args, **kwargs)
            return changed(stock(self, *args, **kwargs), way)

        return forward

    return f"{'input' if is_input else 'output'}: {way}", make, way, way.is_exact


def on_class(place, rng):
    text, make, way, is_exact = draw_forward(place, rng, is_global=True)
    wraps = rng.random() < 0.4

    def install(model):
        cls = next(cls for cls in type(place.of(model)).__mro__ if "forward" in vars(cls))
        forward = make(cls.forward, way)
        return set_attribute(cls, "forward", functools.wraps(cls.forward)(forward) if wraps else forward)

    return Change(describe("class", "wraps" if wraps else "", text), install, True, is_exact, way.name == "noise")


class Callee:
    """An object that is called in the place of a forward."""

    def __init__(self, module, forward):
        self.module, self.forward = module, forward

    def __call__(self, *args, **kwargs):
        return self.forward(self.module, *args, **kwargs)


def on_object(place, rng):
    text, make, way, is_exact = draw_forward(place, rng)
    style = rng.choice(["method", "partial", "closure", "callable", "wraps"])
    is_around = rng.random() < 0.6  # the forward that is there, rather than that of the class

    def install(model):
        module, fresh = place.of(model), way.fresh()
        there = module.forward
        stock = (lambda self, *args, **kwargs: there(*args, **kwargs)) if is_around else type(module).forward
        function = make(stock, fresh)
        forward = {"method": types.MethodType(function, module), "partial": functools.partial(function, module),
                   "closure": lambda *args, **kwargs: function(module, *args, **kwargs), "callable": Callee(module, function),
                   "wraps": functools.wraps(there)(lambda *args, **kwargs: function(module, *args, **kwargs))}[style]  # fmt: skip
        return set_attribute(module, "forward", forward)

    return Change(describe(style, "" if is_around else "of the class", text), install, False, is_exact, way.name == "noise")


def as_subclass(place, rng):
    text, make, way, is_exact = draw_forward(place, rng)
    is_new = rng.random() < 0.5 and place.kind not in ("model", "backbone")

    def install(model):
        module = place.of(model)
        cls = type(module)
        sub = type("My" + cls.__name__, (cls,), {"forward": make(cls.forward, way.fresh()), "__module__": __name__})
        if not is_new:
            module.__class__ = sub
            return lambda: setattr(module, "__class__", cls)
        new = sub.__new__(sub)
        new.__dict__.update({name: value for name, value in module.__dict__.items() if name != "forward"})
        return set_attribute(*place_of(model, module), new)

    return Change(describe("new module of a subclass" if is_new else "__class__", text), install, False, is_exact,
                  way.name == "noise")  # fmt: skip


class Wrapper(nn.Module):
    """A module around another, whose attributes it has."""

    def __init__(self, module, forward):
        super().__init__()
        self.wrapped, self.call = module, forward

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)

    def forward(self, *args, **kwargs):
        return self.call(self.wrapped, *args, **kwargs)


def in_wrapper(place, rng):
    text, make, way, is_exact = draw_forward(place, rng)
    calls = lambda module, *args, **kwargs: module(*args, **kwargs)

    def install(model):
        module = place.of(model)
        return set_attribute(*place_of(model, module), Wrapper(module, make(calls, way.fresh())))

    return Change(describe("wrapper", text), install, False, is_exact, way.name == "noise")


# Hooks


def hooked(way, is_before):
    """(hook, arguments of its registration) of a forward hook."""

    def before_forward(_module, args, kwargs):
        return changed_input(args, kwargs, way)

    def after_forward(_module, _args, output):
        return None if way.name == "nothing" else changed(output, way)

    def after_with_kwargs(_module, _args, _kwargs, output):
        return after_forward(_module, _args, output)

    return before_forward if is_before else after_forward, after_with_kwargs


def by_hook(place, rng):
    way, is_before, with_kwargs = draw_behaviour(rng), rng.random() < 0.3, rng.random() < 0.3
    more = {"prepend": True} if rng.random() < 0.2 else {"always_call": True} if rng.random() < 0.2 and not is_before else {}

    def install(model):
        module = place.of(model)
        hook, longer = hooked(way.fresh(), is_before)
        if is_before:
            return module.register_forward_pre_hook(hook, with_kwargs=True, **more).remove
        return module.register_forward_hook(longer if with_kwargs else hook, with_kwargs=with_kwargs, **more).remove

    kind = "forward pre-hook" if is_before else "forward hook with kwargs" if with_kwargs else "forward hook"
    return Change(describe(kind, *more, way), install, False, way.is_exact, way.name == "noise")


def of_gradients(gradients, way):
    return tuple(way.of_floats(g) if isinstance(g, torch.Tensor) and g.is_floating_point() else g for g in gradients)


def by_gradient_hook(place, rng):
    way = draw_behaviour(rng, backward=True)
    kind = rng.choice(["full backward hook", "full backward pre-hook", "tensor hook", "parameter hook", "accumulation hook"])

    def install(model):
        module, fresh = place.of(model), way.fresh()
        if kind == "full backward hook":
            return module.register_full_backward_hook(lambda _module, inputs, _outputs: of_gradients(inputs, fresh)).remove
        if kind == "full backward pre-hook":
            return module.register_full_backward_pre_hook(lambda _module, outputs: of_gradients(outputs, fresh)).remove
        if kind == "tensor hook":
            return module.register_forward_hook(lambda _module, _args, output: hook_tensors(output, fresh)).remove
        handles = []
        for parameter in module.parameters():
            if kind == "parameter hook":
                handles.append(parameter.register_hook(fresh.of_floats))
            else:
                handles.append(parameter.register_post_accumulate_grad_hook(
                    lambda parameter: setattr(parameter, "grad", fresh.of_floats(parameter.grad))))  # fmt: skip
        return lambda: [handle.remove() for handle in handles]

    return Change(describe(kind, way), install, False, way.is_exact or kind in ("parameter hook", "accumulation hook"))


def hook_tensors(output, way):
    for tensor in output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else (output,):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(way.of_floats)


def by_global_hook(place, rng):
    kind = rng.choice(["forward", "forward", "pre", "backward"])
    way = draw_behaviour(rng, is_global=True, backward=True if kind == "backward" else None)

    def install(model):
        name = type(place.of(model)).__name__

        def only(hook):
            return lambda module, *more: hook(module, *more) if type(module).__name__ == name else None

        before, after = hooked(way, True)[0], hooked(way, False)[0]
        if kind == "pre":
            return module_globals.register_module_forward_pre_hook(only(lambda module, args: before(module, args, {})[0])).remove
        if kind == "forward":
            return module_globals.register_module_forward_hook(only(after)).remove
        return module_globals.register_module_full_backward_hook(only(lambda _m, inputs, _o: of_gradients(inputs, way))).remove

    return Change(describe("global", kind, way), install, True, way.is_exact, way.name == "noise")


WAYS: dict[str, Callable] = {"class": on_class, "object": on_object, "subclass": as_subclass, "wrapper": in_wrapper,
                             "hook": by_hook, "gradient hook": by_gradient_hook, "global hook": by_global_hook}  # fmt: skip


# Attributes: by the kind of the module (path, value of the old one and a random number, whether trees are exact).


class OfMean(nn.Module):
    """An activation that looks at all tokens."""

    def forward(self, x):
        return nn.functional.silu(x - 0.3 * x.mean(0, keepdim=True))


def _scaled(parameter, u):
    return nn.Parameter(parameter.detach() * (1 + u))


def _with_bias(linear, u):
    new = nn.Linear(linear.in_features, linear.out_features, bias=True, dtype=linear.weight.dtype)
    with torch.no_grad():
        new.weight.copy_(linear.weight)
        new.bias.fill_(u)
    return new


EPS = [("variance_epsilon", lambda old, u: old + u, True), ("eps", lambda old, u: old + u, True), ("weight", _scaled, True)]
ATTRIBUTES: dict[str, list[tuple[str, Callable, bool]]] = {
    "attention": [
        ("scaling", lambda old, u: old * (1 + u), True),
        ("is_causal", lambda old, u: False, False),
        ("sliding_window", lambda old, u: 3, False),
        ("attention_dropout", lambda old, u: 0.3, False),
        ("layer_idx", lambda old, u: None, True),
        ("head_dim_of_mine", lambda old, u: 8, True),
        ("sinks", _scaled, True),
        ("config._attn_implementation", lambda old, u: "eager", True),
    ],
    "projection": [("weight", _scaled, True), ("bias", lambda old, u: None, True)],
    "q_norm": EPS,
    "mlp": [
        ("act_fn", lambda old, u: nn.GELU(), True),
        ("act_fn", lambda old, u: torch.tanh, True),
        ("act_fn", lambda old, u: OfMean(), False),
        ("down_proj", _with_bias, True),
        ("training", lambda old, u: False, True),
    ],
    "linear of the mlp": [("weight", _scaled, True)],
    "input norm": EPS,
    "final norm": EPS,
    "layer": [
        ("input_layernorm", lambda old, u: nn.Identity(), True),
        ("mlp", lambda old, u: nn.Dropout(0.3), False),
        ("self_attn.is_causal", lambda old, u: False, False),
        ("training", lambda old, u: False, True),
    ],
    "backbone": [
        ("config.num_hidden_layers", lambda old, u: 1, True),
        ("config.sliding_window", lambda old, u: 3, False),
        ("config.is_causal", lambda old, u: False, False),
        ("config.use_cache", lambda old, u: False, True),
        ("config._attn_implementation", lambda old, u: "eager", True),
        ("layers", lambda old, u: nn.ModuleList(list(old)[:1]), True),
        ("layers", lambda old, u: nn.ModuleList(list(old)[::-1]), True),
        ("gradient_checkpointing", lambda old, u: True, False),
    ],
    "embedding": [
        ("padding_idx", lambda old, u: 3, True),
        ("max_norm", lambda old, u: 1.0, True),
        ("scale_grad_by_freq", lambda old, u: True, False),
        ("weight", _scaled, True),
        ("neftune_noise_alpha", lambda old, u: 5.0, True),
    ],
    "rotary": [
        ("attention_scaling", lambda old, u: old * (1 + u), True),
        ("inv_freq", lambda old, u: old * (1 + u), True),
        ("rope_type", lambda old, u: "dynamic", False),
    ],
    "head": [("weight", _scaled, True), ("bias", lambda old, u: nn.Parameter(torch.full([61], u, dtype=torch.float64)), True)],
    "model": [
        ("config.output_router_logits", lambda old, u: True, True),
        ("router_aux_loss_coef", lambda old, u: 1 + u, True),
        ("loss_type", lambda old, u: "ForMaskedLM", True),
        ("_loss_function", lambda old, u: own_loss, True),
        ("config._attn_implementation", lambda old, u: "eager", True),
        ("config.logits_scaling", lambda old, u: 2.0, True),
        ("training", lambda old, u: False, True),
    ],
    "router": [("top_k", lambda old, u: 1, True), ("norm_topk_prob", lambda old, u: not old, True), ("weight", _scaled, True)],
    "experts": [
        ("act_fn", lambda old, u: nn.GELU(), True),
        ("act_fn", lambda old, u: OfMean(), False),
        ("limit", lambda old, u: 0.7, True),
        ("alpha", lambda old, u: 1.0, True),
    ],
    "mixer": [
        ("activation", lambda old, u: None, True),
        ("activation", lambda old, u: "gelu", False),
        ("chunk_size", lambda old, u: 4, True),
        ("time_step_limit", lambda old, u: (0.1, 0.5), True),
        ("dt_bias", _scaled, True),
        ("A_log", _scaled, True),
        ("D", _scaled, True),
    ],
    "convolution": [("weight", _scaled, True), ("padding", lambda old, u: (1,), True), ("bias", lambda old, u: None, True)],
    "gated norm": [*EPS, ("group_size", lambda old, u: old // 2, True)],
}  # fmt: skip


def own_loss(logits=None, labels=None, vocab_size=None, *_, **__):
    """The mean over rows of means over tokens."""
    losses = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    return (losses.sum(1) / (labels[:, 1:] != -100).sum(1).clamp(min=1)).mean()


NUMBERS = ("variance_epsilon", "eps", "group_size", "limit", "alpha")  # which some families do not have


def by_attribute(place, rng):
    path, value, is_exact = rng.choice(ATTRIBUTES[place.kind])
    u = rng.uniform(0.1, 0.5)

    def install(model):
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, place.of(model))
        if name == "neftune_noise_alpha":
            raise Redraw("noise by a hook of the Trainer alone")
        old = getattr(owner, name, None)
        if old is None and (value in (_scaled, _with_bias) or name in NUMBERS):
            raise Redraw(f"no {name}")
        return set_attribute(owner, name, value(old, u))

    is_noise = path in ("attention_dropout", "mlp") and place.kind in ("attention", "layer")
    number = ATTRIBUTES[place.kind].index((path, value, is_exact))
    return Change(describe(f"{path} ({number})", f"{u:.2f}"), install, False, is_exact, is_noise)
