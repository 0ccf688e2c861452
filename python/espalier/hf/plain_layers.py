# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers of Transformers without the libraries that they call where these are installed: flash-linear-attention,
causal-conv1d and mamba-ssm know neither float64 nor CPUs."""

import contextlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch

_CHOOSER = "use_kernel_func_from_hub_with_fallback."  # of Transformers since 5.16, around functions in PyTorch
_OLDER = ("causal_conv1d_fn", "causal_conv1d_update", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule",
          "FusedRMSNormGated")  # fmt: skip


@contextlib.contextmanager
def by_torch() -> Iterator[None]:
    """Inside, layers compute by the functions that Transformers has in PyTorch. Before Transformers 5.16 only layers that are
    made inside do."""
    with contextlib.ExitStack() as stack:
        for module in [module for name, module in sys.modules.items() if name.startswith("transformers.models.") and module]:
            for value in list(vars(module).values()):
                _choose(stack, value)
            if "is_fast_path_available" in vars(module):
                _forget(stack, module)
        yield


def by_torch_on_cpus(device: torch.device) -> AbstractContextManager[None]:
    """by_torch() on a CPU, where these libraries fail; elsewhere layers compute as they do."""
    return by_torch() if device.type == "cpu" else contextlib.nullcontext()


def _choose(stack: contextlib.ExitStack, function: Any) -> None:
    while isinstance(function, FunctionType):
        if function.__code__.co_qualname.startswith(_CHOOSER):
            cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
            plain = cells["torch_function"].cell_contents
            _set(stack, cells["implementation"], plain)
            _set(stack, cells["applicable_params"], tuple(inspect.signature(plain).parameters))
            return
        function = getattr(function, "__wrapped__", None)


def _set(stack: contextlib.ExitStack, cell: CellType, value: Any) -> None:
    stack.callback(setattr, cell, "cell_contents", cell.cell_contents)
    cell.cell_contents = value


def _forget(stack: contextlib.ExitStack, module: ModuleType) -> None:
    values = dict.fromkeys(_OLDER) | {"is_fast_path_available": False}
    for name in values.keys() & vars(module).keys():
        stack.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, values[name])
