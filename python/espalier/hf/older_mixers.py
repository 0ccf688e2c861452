# SPDX-License-Identifier: Apache-2.0
"""Gated delta rules over a forest with Transformers before 5.16.

Their layers keep the functions that they call as attributes, and do not hand them the arguments of the model's forward. So
the attributes are replaced by functions that follow the forest of which the layer around has been told (told.py)."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.nn.functional import conv1d, silu

from . import mixers, told

_REPLACED = {"causal_conv1d_fn": "causal_conv1d_fn", "chunk_gated_delta_rule": "torch_chunk_gated_delta_rule"}


def is_older(module: ModuleType, mixer: mixers.Mixer) -> bool:
    """Whether layers of `module` with `mixer` are as this module has them."""
    return mixer is mixers.GATED_DELTA_NET and hasattr(module, "is_fast_path_available")


def attach(backbone: Any, mixer: mixers.Mixer) -> None:
    """Makes the recurrent layers of `backbone` follow the forest; harmless where they do."""
    told.attach(backbone, every_layer=True)
    for inner in _mixers_of(backbone):
        if not isinstance(inner.causal_conv1d_fn, OnTree):
            for name, counted in _REPLACED.items():
                setattr(inner, name, OnTree(counted, getattr(inner, name), mixer[counted]))


def detach(backbone: Any) -> None:
    """Takes back `attach`."""
    for inner in _mixers_of(backbone):
        for name in _REPLACED:
            setattr(inner, name, getattr(getattr(inner, name), "stock", getattr(inner, name)))


def _mixers_of(backbone: Any) -> list[Any]:
    return [module for module in backbone.modules() if all(hasattr(module, name) for name in _REPLACED)]


class OnTree:
    """A function of a recurrent layer that follows a forest where there is one."""

    def __init__(self, counted: str, stock: Callable[..., Any] | None, on_tree: Callable[..., Any]) -> None:
        self.counted, self.stock, self.on_tree = counted, stock, on_tree

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = told.run_of_layer()
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
