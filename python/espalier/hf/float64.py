# SPDX-License-Identifier: Apache-2.0
"""What models of Transformers need to compute in float64 throughout."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .plain_layers import by_torch


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

        return function(*map(wider, args), **{name: wider(value) for name, value in (kwargs or {}).items()})
