# SPDX-License-Identifier: Apache-2.0
"""Losses that are functions of log-probabilities, in PyTorch."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

Loss: TypeAlias = "Callable[[list[Tensor], list[Tensor]], Tensor | tuple[Tensor, Mapping[str, float]]]"


class LossFunction:
    """A loss of the caller as the engine calls it, in arrays; keeps its metrics."""

    def __init__(self, function: "Loss") -> None:
        self._function = function
        self.metrics: dict[str, float] = {}

    def __call__(self, offsets: NDArray[np.int64], positions: NDArray[np.int64],
                 logprobs: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:  # fmt: skip
        import torch

        sizes = np.diff(offsets).tolist()
        with torch.inference_mode(False), torch.enable_grad():
            leaf = torch.from_numpy(logprobs).requires_grad_()
            loss = self._function(list(leaf.split(sizes)), list(torch.from_numpy(positions).split(sizes)))
            metrics: Mapping[str, float] = {}
            if isinstance(loss, tuple) and len(loss) == 2:
                loss, metrics = loss
            loss = _checked_loss(loss)
            (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        if gradient is None:
            raise InputError("objective: expected a loss that depends on the log-probabilities, received one that "
                             "does not")  # fmt: skip
        self.metrics = {name: float(value) for name, value in metrics.items()}
        return loss.item(), np.ascontiguousarray(gradient.numpy())


def _checked_loss(loss: object) -> "Tensor":
    import torch

    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            what = "one that does not require a gradient"
        raise InputError("objective: expected the function to return a tensor with one element that depends on the "
                         f"log-probabilities, or a pair of it and a dict of metrics; received {what}")  # fmt: skip
    return loss
