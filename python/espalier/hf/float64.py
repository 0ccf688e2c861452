# SPDX-License-Identifier: Apache-2.0
"""Modes of PyTorch in which proofs run models: in float64 throughout, and on the CPU."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from .origin import is_library_code
from .plain_layers import by_torch


class OnCpu(DeviceContext):
    """Inside, tensors are made on the CPU, whatever the default device is."""

    def __init__(self) -> None:
        super().__init__("cpu")

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:  # fmt: skip
        return super().__torch_function__(_stock(function), types, args, kwargs)  # type: ignore[no-untyped-call]


class InFloat64(TorchFunctionMode):
    """Inside, a model in float64 computes in float64 also what its code casts to float32, and by PyTorch alone."""

    def __enter__(self) -> "InFloat64":
        self._layers = ExitStack()
        self._layers.enter_context(by_torch())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._layers.close()

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:  # fmt: skip
        if function is torch.Tensor.float:
            function = torch.Tensor.double

        def wider(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        return _stock(function)(*map(wider, args), **{name: wider(value) for name, value in (kwargs or {}).items()})


def _stock(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, or the one of torch.nn.functional in whose place it is: those pass on themselves by their names there, so that
    a replacement that calls what it replaces would run twice."""
    if not isinstance(function, FunctionType) or is_library_code(function):
        return function
    caller = sys._getframe(3)  # __torch_function__, handle_torch_function, the caller
    return FunctionType(caller.f_code, caller.f_globals) if caller.f_globals is vars(nn.functional) else function
