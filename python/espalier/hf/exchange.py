# SPDX-License-Identifier: Apache-2.0
"""Rows of tensors on their way to the ranks that read them, and their gradients on the way back."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..rank_group import RankGroup


class Swap(Protocol):
    """What is exchanged, as step.division.Swap has it."""

    @property
    def picks(self) -> tuple[NDArray[np.int64], ...]: ...

    @property
    def order(self) -> NDArray[np.int64] | None: ...

    @property
    def send(self) -> tuple[int, ...]: ...

    @property
    def receive(self) -> tuple[int, ...]: ...

    @property
    def is_needed(self) -> bool: ...


class Route:
    """A Swap on the device of the tensors, for the ranks of a group."""

    def __init__(self, swap: Swap, group: RankGroup, device: torch.device) -> None:
        self.group, self.is_needed = group, swap.is_needed
        self.send, self.receive = list(swap.send), list(swap.receive)
        self.picks = [torch.from_numpy(pick).to(device) for pick in swap.picks]
        self.order = None if swap.order is None else torch.from_numpy(swap.order).to(device)

    def forwards(self, rows: Tensor) -> Tensor:
        return self._exchanged(rows, self.send, self.receive)

    def backwards(self, rows: Tensor) -> Tensor:
        return self._exchanged(rows, self.receive, self.send)

    def _exchanged(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        self.group.check()
        found = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(found, rows.contiguous(), receive, send, group=self.group.group)
        self.group.sent_bytes += rows.numel() * rows.element_size()
        return found


class Exchange(torch.autograd.Function):
    """(turn, rows [S, W]): what this rank receives by a Route of sources, each of which has so many tensors [N, ...] beside one
    another, whose elements of a row follow one another. `turn` is a number that one exchange hands to the next: so all ranks
    run the same exchanges in backward, in reverse order, whatever else depends on them. Gradients of a row that several ranks
    have read are summed, in float32 at least."""

    @staticmethod
    def forward(ctx: Any, turn: Tensor, route: Route, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.route = route
        ctx.like = [(tensor.shape, tensor.dtype) for tensor in tensors]
        picked = [torch.cat([tensor.flatten(1).index_select(0, pick) for tensor in of], 1)
                  for pick, of in _sources(route, tensors)]  # fmt: skip
        rows = torch.cat(picked) if len(picked) > 1 else picked[0]
        return turn.clone(), route.forwards(rows if route.order is None else rows.index_select(0, route.order))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, turn: Tensor, gradient: Tensor) -> tuple[Tensor | None, ...]:
        route: Route = ctx.route
        rows = route.backwards(gradient)
        if route.order is not None:
            rows = torch.empty_like(rows).index_copy_(0, route.order, rows)
        found: list[Tensor | None] = []
        parts = rows.split([len(pick) for pick in route.picks])
        for part, (pick, like) in zip(parts, _sources(route, ctx.like)):
            widths = [shape[1:].numel() for shape, _ in like]
            found += [_summed(columns, pick, shape, dtype) for columns, (shape, dtype) in zip(part.split(widths, 1), like)]
        return turn, None, *found


def _sources(route: Route, values: Sequence[Any]) -> list[tuple[Tensor, Sequence[Any]]]:
    """(pick, values) of each source."""
    count = len(values) // len(route.picks)
    return [(pick, values[number * count : (number + 1) * count]) for number, pick in enumerate(route.picks)]


def _summed(rows: Tensor, pick: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
    if len(pick) == 0:
        return None
    wide = torch.promote_types(dtype, torch.float32)
    sums = rows.new_zeros(shape[0], rows.shape[1], dtype=wide)
    return sums.index_add_(0, pick, rows.to(wide)).to(dtype).view(shape)
