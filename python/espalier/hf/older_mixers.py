# SPDX-License-Identifier: Apache-2.0
"""Gated delta rules over a forest with Transformers before 5.16.

Their layers keep the functions that they call as attributes, and do not hand them the arguments of the model's forward. So
the attributes are replaced by functions that follow the forest of which a hook on the layer around has told them, inside of
what checkpointing computes again as well."""

import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

from . import mixers

_here = threading.local()  # .run: the TreeRun of the layer that runs in this thread
_REPLACED = {"causal_conv1d_fn": "causal_conv1d_fn", "chunk_gated_delta_rule": "torch_chunk_gated_delta_rule"}


def is_older(module: ModuleType, mixer: mixers.Mixer) -> bool:
    """Whether layers of `module` with `mixer` are as this module has them."""
    return mixer is mixers.GATED_DELTA_NET and hasattr(module, "is_fast_path_available")


def attach(backbone: Any, mixer: mixers.Mixer) -> None:
    """Makes the recurrent layers of `backbone` follow the forest; harmless where they do."""
    for layer, inner in _mixers_of(backbone):
        if not isinstance(inner.causal_conv1d_fn, OnTree):
            layer.register_forward_pre_hook(_tell, with_kwargs=True)
            layer.register_forward_hook(_forget, always_call=True)
            for name, counted in _REPLACED.items():
                setattr(inner, name, OnTree(counted, getattr(inner, name), mixer[counted]))


def detach(backbone: Any) -> None:
    """Takes back `attach`."""
    for layer, inner in _mixers_of(backbone):
        for hooks, own in ((layer._forward_pre_hooks, _tell), (layer._forward_hooks, _forget)):
            for key in [key for key, hook in hooks.items() if hook is own]:
                del hooks[key]
                layer._forward_pre_hooks_with_kwargs.pop(key, None)
                layer._forward_hooks_always_called.pop(key, None)
        for name in _REPLACED:
            setattr(inner, name, getattr(getattr(inner, name), "stock", getattr(inner, name)))


def _mixers_of(backbone: Any) -> list[tuple[Any, Any]]:
    return [(layer, layer.linear_attn) for layer in backbone.layers if hasattr(layer, "linear_attn")]


class OnTree:
    """A function of a recurrent layer that follows a forest where there is one."""

    def __init__(self, counted: str, stock: Callable[..., Any] | None, on_tree: Callable[..., Any]) -> None:
        self.counted, self.stock, self.on_tree = counted, stock, on_tree

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = getattr(_here, "run", None)
        if run is not None:
            run.calls[self.counted].add_(1)
            if "x" in kwargs:
                kwargs["hidden_states"] = kwargs.pop("x")
            return self.on_tree(run, *args, **kwargs)
        return (self.stock or _convolve)(*args, **kwargs)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, **_: Any) -> Tensor:
    """What a layer does where it has no causal_conv1d_fn."""
    out = conv1d(x, weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=len(weight))
    return silu(out[..., :x.shape[-1]])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _tell(layer: Any, _args: Any, kwargs: Mapping[str, Any]) -> None:
    run = kwargs.get("espalier_tree")
    _here.run = None if run is None else run.at(layer.linear_attn.layer_idx)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forget(_layer: Any, _args: Any, _output: Any) -> None:
    _here.run = None
