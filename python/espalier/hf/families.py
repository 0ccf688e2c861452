# SPDX-License-Identifier: Apache-2.0
"""What can be patched: families of models that are tested on trees, and what of them is refused."""

import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import Unsupported
from . import deepspeed, mixers, versions
from .dropout import NOISE
from .dropout import check_module as check_dropout
from .origin import home_of, is_library_code

if TYPE_CHECKING:
    from .run import TreeRun

# Those that the tests cover with all their options: model_type -> the class of the backbone, and the recurrent mixer among its
# layers. A proof decides for all others (proof.py).
FAMILIES: dict[str, tuple[str, mixers.Mixer | None]] = {
    "llama": ("LlamaModel", None),
    "mistral": ("MistralModel", None),
    "olmo3": ("Olmo3Model", None),
    "qwen2": ("Qwen2Model", None),
    "qwen3": ("Qwen3Model", None),
    "qwen3_moe": ("Qwen3MoeModel", None),
    "glm4_moe": ("Glm4MoeModel", None),
    "gpt_oss": ("GptOssModel", None),
    "qwen3_next": ("Qwen3NextModel", mixers.GATED_DELTA_NET),
    "qwen3_5_text": ("Qwen3_5TextModel", mixers.GATED_DELTA_NET),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextModel", mixers.GATED_DELTA_NET),
    "mamba2": ("Mamba2Model", mixers.MAMBA2),
    "granitemoehybrid": ("GraniteMoeHybridModel", mixers.MAMBA2),
}
ROPE_TYPES = {"default", "linear", "llama3", "proportional", "yarn"}  # those that rotate by the position alone


def inside_trainer(model: Any) -> Any:
    """The model inside of what a trainer has put around it and calls in its own way: DeepSpeed's engine, or a module of which the
    model is all, such as OpenRLHF's Actor. Any other model itself."""
    while True:
        if deepspeed.is_engine(model):
            model = model.module
            continue
        is_foreign = isinstance(model, nn.Module) and not type(model).__module__.startswith(("torch.", "transformers.", "peft."))
        children = list(model.children()) if is_foreign and not isinstance(model, PreTrainedModel) else []
        if len(children) != 1 or not (isinstance(children[0], PreTrainedModel) or _inside_wrapper(children[0]) is not None):
            return model
        model = children[0]


def _inside_wrapper(module: Any) -> Any:
    """The model inside of one wrapper; None where it is none."""
    if deepspeed.is_engine(module) or isinstance(module, nn.parallel.DistributedDataParallel):
        return module.module
    if hasattr(module, "get_base_model"):  # PEFT
        return module.get_base_model()
    return getattr(module, "_orig_mod", None)  # torch.compile


def unwrapped(model: Any) -> Any:
    """The model of Transformers inside of wrappers: PEFT, torch.compile, DistributedDataParallel, what trainers put around it."""
    inner = inside_trainer(model)
    while (wrapped := _inside_wrapper(inner)) is not None:
        inner = inside_trainer(wrapped)
    return inner


def backbone_of(model: Any) -> Any:
    """The module of `model` that turns token ids into hidden states; `model` may be wrapped, by PEFT for example.

    Raises Unsupported where it is none of Transformers."""
    inner = unwrapped(model)
    if isinstance(inner, nn.DataParallel):
        raise Unsupported("nn.DataParallel: expected one process for each GPU, as torchrun starts them, received a model "
                          "that is copied to several; give model.module")  # fmt: skip
    base = _base_of(inner)
    backbone = getattr(base, "language_model", base)
    model_type = getattr(getattr(backbone, "config", None), "model_type", None)
    if stock_class(backbone) is None:
        expected = FAMILIES[model_type][0] if model_type in FAMILIES else "a model"
        raise Unsupported(f"espalier.hf.patch: expected {expected} of Transformers as the backbone of "
                          f"model_type {model_type!r}, received {type(backbone).__name__} from "
                          f"{type(backbone).__module__}")  # fmt: skip
    return backbone


def composite_of(model: Any) -> Any:
    """The module of `model` that hands embeddings to its language model, of a model for text and images; None of others."""
    base = _base_of(unwrapped(model))
    return base if isinstance(getattr(base, "language_model", None), nn.Module) else None


def _base_of(inner: Any) -> Any:
    base = getattr(inner, "base_model", inner)
    has_head = base is inner and getattr(inner, "get_output_embeddings", lambda: None)() is not None
    base = getattr(inner, "model", inner) if has_head else base  # the prefix of some heads names nothing
    is_around = list(getattr(base, "_modules", ())) == ["decoder"]  # heads go past what is around a decoder alone
    return base.decoder if is_around else base


def stock_class(backbone: Any) -> Any:
    """The class of Transformers that `backbone` is made of (FSDP2 derives its own from it); None if it is of
    another."""
    model_type = getattr(getattr(backbone, "config", None), "model_type", None)
    name = FAMILIES[model_type][0] if model_type in FAMILIES else None
    return next((cls for cls in type(backbone).__mro__
                 if cls.__module__.startswith("transformers.models.") and name in (None, cls.__name__)), None)  # fmt: skip


def is_tested_family(backbone: Any) -> bool:
    """Whether the tests cover `backbone` with versions of Transformers that they know, and nobody has changed its code."""
    patch = backbone.__dict__.get("_espalier")
    return backbone.config.model_type in FAMILIES and not (patch is not None and patch.has_changed_code)


def mixer_of(backbone: Any) -> tuple[ModuleType, mixers.Mixer] | None:
    """(module of Transformers, mixer) of the recurrent layers of `backbone`; None if it has none. Of families that a proof
    decides on, all functions of the module that we know."""
    module = sys.modules[stock_class(backbone).__module__]
    if is_tested_family(backbone):
        mixer = FAMILIES[backbone.config.model_type][1]
    else:
        mixer = mixers.known_of(module)
    return (module, mixer) if mixer else None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def check_followed(backbone: Any, run: "TreeRun") -> None:
    """Call after a forward pass. Raises Unsupported where attention or recurrent mixers of `backbone` have called other
    functions than those that follow the forest of the TreeRun."""
    attention = backbone._espalier.attention
    missing = [path for number, path in attention.items() if number not in run.attended]
    if len(missing) > int(run.compiled_calls):
        raise Unsupported(f"attention: expected a call for each of {len(attention)} layers that follows the forest, received "
                          f"none from {missing[0]} ({type(backbone.get_submodule(missing[0])).__name__}), whose forward calls "
                          "something else; train this model unpatched")  # fmt: skip
    if not is_tested_family(backbone) or (found := mixer_of(backbone)) is None:
        return
    layers = sum("conv1d" in module._modules for module in backbone.modules())
    for name in found[1]:
        if name in mixers.COUNTED and (calls := int(run.calls[name])) != layers:
            raise Unsupported(f"recurrent layers: expected {layers} calls of {name} that follow the forest, received {calls} "
                              f"with Transformers {versions.VERSION}, whose layers call something "
                              f"else{versions.what_to_pin()}")  # fmt: skip


def check_model(backbone: Any) -> None:
    """Raises Unsupported for what patching cannot serve, whatever the batch."""
    config = backbone.config
    for rope_type in _values_of(getattr(config, "rope_parameters", None), "rope_type"):
        if rope_type not in ROPE_TYPES:
            raise Unsupported(f"rope_type: expected {', '.join(sorted(ROPE_TYPES))}, received {rope_type!r}, whose "
                              "angles depend on the length of the batch")  # fmt: skip
    if getattr(config, "is_causal", True) is False:
        raise Unsupported("is_causal: expected causal attention, received False: tokens would see what rows do not "
                          "share")  # fmt: skip
    if is_tested_family(backbone) and mixer_of(backbone) and config.hidden_act not in mixers.ACTIVATIONS:
        raise Unsupported(f"hidden_act: expected {' or '.join(sorted(filter(None, mixers.ACTIVATIONS)))}, received "
                          f"{config.hidden_act!r}")  # fmt: skip


def modules_with_settings(backbone: Any) -> list[tuple[str, Any]]:
    """(path, module) of the modules of a backbone that have settings of training."""
    settings = ("drop", "jitter", NOISE, "checkpoint")
    return [(path, module) for path, module in backbone.named_modules()
            if isinstance(module, nn.modules.dropout._DropoutNd)
            or any(part in name for name in vars(module) for part in settings)]  # fmt: skip


def check_training(modules: Iterable[tuple[str, Any]], dropout: str | None = None) -> None:
    """Raises Unsupported for settings of training under which a token's result is not a function of its path alone, or would not
    be found again in backward. modules: as modules_with_settings gives them; dropout: as `patch` takes it."""
    for name, module in modules:
        if not module.training:
            continue
        check_dropout(name, module, dropout)
        _check_checkpointing(module)


def refuse_alora(backbone: Any) -> None:
    """Raises Unsupported for adapters that act on the tokens of a row after some others: a Step knows no rows."""
    for name, module in backbone.named_modules():
        if _has_alora(module):
            raise Unsupported("aLoRA (alora_invocation_tokens): expected adapters that act on all tokens, received one in "
                              f"{name} that looks for its invocation in each row; leave alora_invocation_tokens "
                              "out")  # fmt: skip


def _has_alora(module: Any) -> bool:
    variants = getattr(module, "lora_variant", None)  # of PEFT, by adapter
    if not isinstance(variants, dict) or getattr(module, "disable_adapters", False):
        return False
    return any(type(variants.get(name)).__name__.startswith("ALora") for name in module.active_adapters)


def _check_checkpointing(module: Any) -> None:
    """Raises Unsupported for gradient checkpointing other than PyTorch's without reentry. Libraries replace its function for the
    whole process, before this module is imported or after it, by one that may not heed `use_reentrant`."""
    implementation = getattr(module, "checkpoint_impl", None)  # torch's wrapper of single layers
    function = getattr(module, "_gradient_checkpointing_func", None)
    if implementation is not None:
        use_reentrant = implementation.name == "REENTRANT"
    elif getattr(module, "gradient_checkpointing", False) and function is not None:
        function, use_reentrant = _checkpoint_of(function)
        if not is_library_code(function, "checkpoint"):
            while home_of(function).startswith("torch.") and hasattr(function, "__wrapped__"):  # a decorator of PyTorch
                function = function.__wrapped__
            name = getattr(function, "__name__", type(function).__name__)
            raise Unsupported(f"gradient checkpointing: expected that of PyTorch with use_reentrant=False, received {name} from "
                              f"{home_of(function)}; undo what has put it there, or train this model without it")  # fmt: skip
    else:
        return
    if use_reentrant is not False:
        raise Unsupported("gradient checkpointing: expected use_reentrant=False, received True; enable it with "
                          "{'use_reentrant': False}")  # fmt: skip


def _checkpoint_of(function: Any) -> tuple[Any, Any]:
    """(checkpoint, use_reentrant) of what Transformers checkpoints layers with."""
    if home_of(function).startswith("llamafactory."):
        function = getattr(function, "__wrapped__", function)  # theirs only chooses which layers it is for
    keywords = function.keywords if isinstance(function, functools.partial) else {}
    function = getattr(function, "func", function)
    if not home_of(function).startswith("swift."):
        return function, keywords.get("use_reentrant")
    # That of ms-swift decides by itself, whatever it is called with.
    return getattr(function, "__wrapped__", function), inspect.getclosurevars(function).nonlocals.get("use_reentrant_")


def _values_of(tree: Any, key: str) -> Iterator[Any]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name == key:
                yield value
            else:
                yield from _values_of(value, key)
