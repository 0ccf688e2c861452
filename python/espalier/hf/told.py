# SPDX-License-Identifier: Apache-2.0
"""The forest for what is called without it: attention and mixers whose layer does not pass on the arguments of the model's
forward, and embeddings of positions that count rows.

Hooks on such layers keep the forest that a layer is handed, for this thread, until the layer ends, and inside of what
checkpointing computes again as well."""

import contextlib
import dis
import functools
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from .for_now import remove_hooks

if TYPE_CHECKING:
    from .run import TreeRun

_here = threading.local()  # .layers: TreeRuns of the layers around, None where one has none; .model: that of the model
_POSITIONS = re.compile(r"Position(al)?Embedding")


def run_of_layer() -> "TreeRun | None":
    """The TreeRun of the innermost layer that runs in this thread, as the layer sees it."""
    layers: list[TreeRun | None] = getattr(_here, "layers", [])
    return layers[-1] if layers else None


@contextlib.contextmanager
def of_layer(run: "TreeRun | None") -> Iterator[None]:
    """Inside, `run_of_layer()` is `run`."""
    _push(run)
    try:
        yield
    finally:
        _here.layers.pop()


@contextlib.contextmanager
def of_model(run: "TreeRun | None") -> Iterator[None]:
    """Inside, embeddings of positions take those of `run`."""
    before, _here.model = getattr(_here, "model", None), run
    try:
        yield
    finally:
        _here.model = before


def attach(backbone: Any, every_layer: bool = False) -> bool:
    """Makes embeddings of positions of `backbone` know of the forest, and layers that do not pass on what they are handed, or
    every layer: those with recurrent mixers may hand it on to some. Returns whether there are such. Harmless where they know
    of it."""
    is_any = False
    for module in backbone.modules():
        if isinstance(module, GradientCheckpointingLayer) and (every_layer or not _hands_on(module)):
            is_any = True
            if _tell not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_tell, with_kwargs=True)
                module.register_forward_hook(_forget, always_call=True)
        if _takes_positions(module):
            is_any = True
            if _set_positions not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_set_positions, with_kwargs=True)
    return is_any


def detach(backbone: Any) -> None:
    """Takes back `attach`."""
    for module in backbone.modules():
        remove_hooks(module, _tell, _forget, _set_positions)


def _hands_on(layer: Any) -> bool:
    """Whether the code of a layer calls anything with the arguments **kwargs."""
    code = dis.get_instructions(inspect.unwrap(type(layer).forward))
    return any(instruction.opname == "CALL_FUNCTION_EX" for instruction in code)


def _takes_positions(module: Any) -> bool:
    return bool(_POSITIONS.search(type(module).__name__)) and "position_ids" in inspect.signature(module.forward).parameters


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _set_positions(_module: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    run: TreeRun | None = getattr(_here, "model", None)
    if run is None:
        return None
    given = kwargs.get("position_ids")
    positions = run.position.long()
    is_batch = given is not None and given.dim() == 2
    return args, {**kwargs, "position_ids": positions.unsqueeze(0) if is_batch else positions}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _tell(layer: Any, _args: Any, kwargs: Mapping[str, Any]) -> None:
    run = kwargs.get("espalier_tree") or run_of_layer()
    if run is not None and (index := _index_of(layer)) is not None:
        run = run.at(index)
    _push(run)
    function = layer.__dict__.get("_gradient_checkpointing_func")
    if run is not None and function is not None:
        layer._gradient_checkpointing_func = functools.partial(_checkpointed, function, threading.get_ident(), run)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forget(layer: Any, _args: Any, _output: Any) -> None:
    run = _here.layers.pop()
    function = layer.__dict__.get("_gradient_checkpointing_func")
    if run is not None and getattr(function, "func", None) is _checkpointed:
        layer._gradient_checkpointing_func = function.args[0]


def _push(run: "TreeRun | None") -> None:
    if not hasattr(_here, "layers"):
        _here.layers = []
    _here.layers.append(run)


def _index_of(layer: Any) -> int | None:
    """The number of a layer, which it or a module in it knows."""
    numbers = (getattr(module, "layer_idx", None) for module in layer.modules())
    return next((number for number in numbers if isinstance(number, int)), None)


def _checkpointed(stock: Callable[..., Any], thread: int, run: "TreeRun", function: Callable[..., Any], *args: Any) -> Any:
    """Checkpointing of a layer, which computes again without the hooks of the layer."""
    if threading.get_ident() != thread:  # the same layer in another thread
        return stock(function, *args)
    return stock(functools.partial(_telling, run, function), *args)


def _telling(run: "TreeRun", function: Callable[..., Any], *args: Any) -> Any:
    with of_layer(run):
        return function(*args)
