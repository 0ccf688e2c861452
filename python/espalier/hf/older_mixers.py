# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers over a forest with Transformers before 5.16.

Their mixers keep the functions that they call as attributes, or call a module for their convolution, and hand neither the
arguments of the model's forward. So both follow the forest of which the layer around has been told (told.py)."""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import conv1d, pad, silu

from . import mixers, told
from .families import FAMILIES, stock_class
from .for_now import remove_hooks
from .origin import stock_of

_REPLACED = {"causal_conv1d_fn": "causal_conv1d_fn", "chunk_gated_delta_rule": "torch_chunk_gated_delta_rule"}


def is_older(backbone: Any) -> bool:
    """Whether recurrent layers of `backbone`, if it has any, are as this module has them."""
    _, mixer = FAMILIES.get(backbone.config.model_type, ("", mixers.GATED_DELTA_NET))
    return mixer is mixers.GATED_DELTA_NET and hasattr(sys.modules[stock_class(backbone).__module__], "is_fast_path_available")


def attach(backbone: Any) -> None:
    """Makes the recurrent layers of `backbone` follow the forest; harmless where they do."""
    told.attach(backbone, every_layer=True)
    for module in backbone.modules():
        if all(hasattr(module, name) for name in _REPLACED) and not isinstance(module.causal_conv1d_fn, OnTree):
            for name, counted in _REPLACED.items():
                setattr(module, name, OnTree(counted, getattr(module, name), mixers.MIXERS[counted]))
        if _is_causal_convolution(module) and _convolved not in module._forward_hooks.values():
            module.register_forward_hook(_convolved)


def detach(backbone: Any) -> None:
    """Takes back `attach`, but for what told.detach does."""
    for module in backbone.modules():
        if all(hasattr(module, name) for name in _REPLACED):
            for name in _REPLACED:
                setattr(module, name, stock_of(getattr(module, name)))
        remove_hooks(module, _convolved)


def _is_causal_convolution(module: Any) -> bool:
    """Whether it is one of each channel on its own, padded so that its first outputs are those of a causal one."""
    return (type(module) is nn.Conv1d and module.groups == module.in_channels == module.out_channels
            and (module.stride, module.dilation, module.padding_mode) == ((1,), (1,), "zeros")
            and module.padding == (module.kernel_size[0] - 1,))  # fmt: skip


def _convolved(module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """The output along the paths of a forest, where there is one; what callers cut off is zeros."""
    run = told.run_of_layer()
    if run is None:
        return output
    found = mixers.MIXERS["causal_conv1d_fn"](run, args[0], module.weight.squeeze(1), module.bias)
    return pad(found, (0, output.shape[-1] - found.shape[-1]))


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
