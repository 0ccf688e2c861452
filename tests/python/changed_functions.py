# SPDX-License-Identifier: Apache-2.0
"""Changes of what the modules of a model call and compute with, drawn at random: functions, attention, weights, adapters."""

import contextlib

import peft
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations import sdpa_attention
from transformers.loss import loss_utils
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from changed_code import changed, changed_input, modeling
from changed_modules import (MODELS, RECURRENT, ROUTED, WAYS, WITHOUT_MAMBA, Change, Place, Redraw, base_of, describe,
                             draw_behaviour, own_loss, set_attribute)  # fmt: skip

IN_STEPS = {"_attn_implementation": "eager"}


def _family(model):
    return modeling(base_of(model).base_model)


def _functional(_model):
    return nn.functional


def _losses(_model):
    return loss_utils


# By name: the module of a function, the models that call it, the dimension of positions in its results, and the config that makes
# them call it.
FUNCTIONS = {
    "apply_rotary_pos_emb": (_family, WITHOUT_MAMBA, -2, {}),
    "rotate_half": (_family, ("llama", "qwen3", "qwen3_moe", "qwen3_next", "olmo2"), -2, {}),
    "eager_attention_forward": (_family, WITHOUT_MAMBA, 1, IN_STEPS),
    "repeat_kv": (_family, WITHOUT_MAMBA, -2, IN_STEPS),
    "repeat_kv of sdpa": (lambda model: sdpa_attention, WITHOUT_MAMBA, -2, {}),
    "create_causal_mask": (_family, WITHOUT_MAMBA, -1, {}),
    "load_balancing_loss_func": (_family, ROUTED, 1, {"output_router_logits": True}),
    "apply_mask_to_padding_states": (_family, RECURRENT, 1, {}),
    "causal_conv1d_fn": (_family, RECURRENT, -1, {}),
    "torch_chunk_gated_delta_rule": (_family, ("qwen3_next",), 1, {}),
    "mamba2_chunk_scan": (_family, ("mamba2",), 1, {}),
    "l2norm": (_family, ("qwen3_next",), -2, {}),
    "functional.scaled_dot_product_attention": (_functional, WITHOUT_MAMBA, -2, {}),
    "functional.softmax": (_functional, WITHOUT_MAMBA, -2, IN_STEPS),
    "functional.linear": (_functional, MODELS, 1, {}),
    "functional.silu": (_functional, MODELS, 1, {}),
    "functional.embedding": (_functional, MODELS, 1, {}),
    "functional.softplus": (_functional, RECURRENT, 1, {}),
    "functional.cross_entropy": (_functional, MODELS, 1, {}),
    "fixed_cross_entropy": (_losses, MODELS, 1, {}),
    "ForCausalLMLoss": (_losses, MODELS, 1, {}),
}


def windowed(stock, _way):
    """A mask as code for a window makes it."""

    def create(*args, **kwargs):
        mask, size = stock(*args, **kwargs), kwargs["inputs_embeds"].shape[1]
        near = torch.ones(size, size, dtype=torch.bool).tril().triu(-3)[None, None]
        if mask is None or mask.dtype == torch.bool:
            return near if mask is None else near & mask
        return mask.masked_fill(~near, torch.finfo(mask.dtype).min)

    return create


def in_both_directions(_stock, _way):
    """Each token sees all of its batch row."""

    def create(*args, **kwargs):
        size = kwargs["inputs_embeds"].shape[1]
        return torch.zeros(1, 1, size, size, dtype=kwargs["inputs_embeds"].dtype)

    return create


def smoothed(stock, _way):
    return lambda *args, **kwargs: stock(*args, **kwargs, label_smoothing=0.1)


def with_square(stock, way):
    """Adds the square of the logarithm of the normaliser, as z-loss does."""
    return lambda logits, *args, **kwargs: stock(logits, *args, **kwargs) + way.amount * logits.logsumexp(-1).square().mean()


def without_mask(stock, _way):
    def plain(query, key, value, attn_mask=None, is_causal=False, **more):
        return stock(query, key, value, is_causal=True, **more)

    return plain


OWN = {"create_causal_mask": (windowed, in_both_directions), "functional.cross_entropy": (smoothed, with_square),
       "fixed_cross_entropy": (with_square,), "functional.scaled_dot_product_attention": (without_mask,)}  # fmt: skip


def around(stock, way):
    return lambda *args, **kwargs: changed(stock(*args, **kwargs), way)


def before(stock, way):
    def call(*args, **kwargs):
        args, kwargs = changed_input(args, kwargs, way)
        return stock(*args, **kwargs)

    return call


def draw_function(name, rng):
    """A function that the code of a model calls, replaced where it looks it up."""
    owner_of, models, dim, settings = FUNCTIONS[name]
    way = draw_behaviour(rng, is_global=True, dim=dim)
    ways = [around] if name == "load_balancing_loss_func" else [around, around, around, before, *OWN.get(name, ())]
    make = rng.choice(ways)
    attribute = name.split()[0].rpartition(".")[2]

    def install(model):
        owner = owner_of(model)
        return set_attribute(owner, attribute, make(getattr(owner, attribute), way))

    is_noise = way.name == "noise" and make in (around, before)
    return models, Change(describe(make.__name__, way), install, True, False, is_noise, settings=settings)


def draw_loss(rng):
    """A loss of one's own: where Transformers looks losses up, or on the model."""
    way, is_of_rows, on_model = draw_behaviour(rng, is_global=True), rng.random() < 0.5, rng.random() < 0.5
    loss = own_loss if is_of_rows else with_square(loss_utils.ForCausalLMLoss, way)

    def install(model):
        if on_model:
            return set_attribute(base_of(model), "_loss_function", loss)  # what loss_function = ... sets
        old = loss_utils.LOSS_MAPPING["ForCausalLM"]
        loss_utils.LOSS_MAPPING["ForCausalLM"] = loss
        return lambda: loss_utils.LOSS_MAPPING.update(ForCausalLM=old)

    return MODELS, Change(describe("on the model" if on_model else "LOSS_MAPPING", "of rows" if is_of_rows else f"square {way}"),
                          install, not on_model, True)  # fmt: skip


# Attention functions: of the layer, queries, keys and values [B, H, S, D], a mask, and what else the layer has.


def _attention(way, style):
    stock = sdpa_attention.sdpa_attention_forward

    def attend(module, query, key, value, attention_mask, scaling=None, **more):
        more = {name: more[name] for name in ("dropout", "is_causal") if name in more}
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        if style == "temperature":
            scaling = scaling * (1 + way.amount)
        if style == "no mask":
            attention_mask = None
        if style == "distance":
            number = torch.arange(query.shape[2], dtype=query.dtype)
            bias = -abs(way.amount) * (number[:, None] - number[None, :])
            more["position_bias"] = bias[None, None]
        if style == "query":
            query = way(query)
        out, weights = stock(module, query, key, value, attention_mask, scaling=scaling, **more)
        return (way(out) if style == "output" else out), weights

    return attend


def draw_attention(how, rng):
    """An attention function that a user has registered under a name of its own, or in the place of another."""
    style = rng.choice(["temperature", "no mask", "distance", "query", "output", "as it is"])
    way = draw_behaviour(rng, is_global=True, dim=2 if style == "query" else 1)
    function, has_mask = _attention(way, style), rng.random() < 0.7

    def registered(model):
        AttentionInterface.register("mine", function)
        if has_mask:
            AttentionMaskInterface.register("mine", sdpa_mask)
        inner = base_of(model)
        old = inner.config._attn_implementation
        inner.set_attn_implementation("mine")

        def take_back():
            inner.set_attn_implementation(old)
            AttentionInterface._global_mapping.pop("mine", None)
            AttentionMaskInterface._global_mapping.pop("mine", None)

        return take_back

    def overridden(_model):
        mapping = AttentionInterface._global_mapping if has_mask else ALL_ATTENTION_FUNCTIONS._local_mapping
        old = mapping.get("sdpa")
        mapping["sdpa"] = function
        return lambda: mapping.pop("sdpa") if old is None else mapping.update(sdpa=old)

    install = registered if how == "registered" else overridden
    is_noise = way.name == "noise" and style in ("query", "output")
    return WITHOUT_MAMBA, Change(describe(style, "with a mask" if has_mask else "", way if style != "as it is" else ""), install,
                                 how != "registered", False, is_noise)  # fmt: skip


# Weights


class Scaled(nn.Module):
    def forward(self, weight):
        return 1.3 * weight


WEIGHTS = {
    "parametrization": lambda module: parametrize.register_parametrization(module, "weight", Scaled()),
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "older weight norm": nn.utils.weight_norm,
    "older spectral norm": nn.utils.spectral_norm,
}


def draw_weights(place, rng):
    """The weight of a module computed from others."""
    name = rng.choice(list(WEIGHTS))
    removable = name in ("parametrization", "spectral norm")

    def install(model):
        module = place.of(model)
        torch.manual_seed(5)
        WEIGHTS[name](module)
        if not removable:
            return lambda: None
        return lambda: parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)

    return Change(name, install, is_exact=True, can_be_removed=removable)


# Adapters

TARGETS = {"mamba2": ["in_proj"], "qwen3_next": ["in_proj_qkvz", "out_proj", "q_proj", "v_proj"]}
METHODS = {
    "lora": lambda targets: peft.LoraConfig(r=3, target_modules=targets),
    "lora of the head": lambda targets: peft.LoraConfig(r=3, target_modules=[*targets, "lm_head"]),
    "dora": lambda targets: peft.LoraConfig(r=3, target_modules=targets, use_dora=True),
    "saved head": lambda targets: peft.LoraConfig(r=3, target_modules=targets, modules_to_save=["lm_head"]),
    "ia3": lambda targets: peft.IA3Config(target_modules=targets, feedforward_modules=[]),
    "vera": lambda targets: peft.VeraConfig(r=4, target_modules=[targets[0]]),
    "loha": lambda targets: peft.LoHaConfig(r=3, target_modules=targets),
    "lily": lambda targets: peft.LilyConfig(r=4, target_modules=targets),
    "velora": lambda targets: peft.LoraConfig(r=4, target_modules=targets, velora_config=peft.VeloraConfig(num_groups=8)),
    "pvera": lambda targets: peft.PveraConfig(r=4, target_modules=[targets[0]]),
}
EXACT_METHODS = ("lora", "lora of the head", "dora", "saved head", "ia3", "vera", "loha")


def _adapted(model, kind, config):
    torch.manual_seed(7)
    task = {} if config.target_modules is None else {"task_type": "CAUSAL_LM"}
    for name, value in task.items():
        setattr(config, name, value)
    model = peft.get_peft_model(model, config).to(torch.float64).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # as after some training
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def draw_adapter(method, rng):
    """An adapter of PEFT around the model, and perhaps a change on top of it: of a layer that has one, or of one inside."""
    name = rng.choice(list(METHODS)) if method == "any method" else "lora"
    top, way_name = None, rng.choice(list(WAYS))
    if method == "lora changed":
        place = Place("projection", rng)
        if rng.random() < 0.5:
            place = InsideOf(place, rng.choice(["lora_A", "lora_B", "base_layer"]))
        top = WAYS[way_name](place, rng)

    def wrap(model):
        kind = base_of(model).config.model_type
        with contextlib.suppress(AttributeError):
            del model.peft_config
        return _adapted(model, kind, METHODS[name](TARGETS.get(kind, ["q_proj", "v_proj"])))

    text = describe(name, top and way_name, top and top.text, top and getattr(place, "name", ""))
    if top is None:
        install, is_global, is_exact, is_noise = (lambda model: lambda: None), False, name in EXACT_METHODS, name == "pvera"
    else:
        install, is_global, is_exact, is_noise = top.install, top.is_global, top.is_exact, top.is_noise
    models = MODELS if top is None else WITHOUT_MAMBA
    return models, Change(text, install, is_global, is_exact, is_noise, can_be_removed=top is not None, wrap=wrap)


class InsideOf:
    """A module inside of the LoRA layer at a Place."""

    def __init__(self, place, name):
        self.place, self.name, self.kind = place, name, "inside of LoRA"

    def of(self, model):
        layer = self.place.of(model)
        if not hasattr(layer, self.name):
            raise Redraw("no adapter here")
        found = getattr(layer, self.name)
        return found["default"] if isinstance(found, nn.ModuleDict) else found
