# SPDX-License-Identifier: Apache-2.0
"""Rows of tensors on their way to the ranks that read them, and their gradients on the way back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..rank_group import RankGroup


Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Swap:
    """One exchange of rows between all ranks of a group, R of them, as one of them sees it.

    picks     for each source int64: which of its rows other ranks get, by receiver
    order     int64: the picked rows of all sources by receiver; empty where they are in this order
    send      [R] rows for each rank
    receive   [R] rows from each rank
    most      rows of the rank that receives most
    """

    picks: Sequence[Integers]
    order: Integers
    send: Integers
    receive: Integers
    most: int

    @property
    def is_needed(self) -> bool:
        """Whether any rank gets any."""
        return self.most > 0


class Route:
    """A Swap on the device of the tensors, for the ranks of a group."""

    def __init__(self, swap: Swap, ranks: RankGroup, device: torch.device) -> None:
        self.ranks, self.is_needed, self.most = ranks, swap.is_needed, swap.most
        self.send, self.receive = swap.send.tolist(), swap.receive.tolist()
        self.picks = [torch.from_numpy(pick).to(device) for pick in swap.picks]
        self.order = torch.from_numpy(swap.order).to(device) if len(swap.order) else None

    def forwards(self, rows: Tensor) -> "Transfer":
        return self._started(rows, self.send, self.receive)

    def backwards(self, rows: Tensor) -> "Transfer":
        return self._started(rows, self.receive, self.send)

    def head_groups(self, key: Tensor, value: Tensor) -> int:
        """In how many transfers, one after another, keys [T, K, D] and values [T, K, E] are sent: a divisor of K, the same on all
        ranks."""
        num_bytes = self.most * (key[0].numel() + value[0].numel()) * key.element_size()
        return max(groups for groups in range(1, MOST_GROUPS + 1)
                   if groups == 1 or (key.shape[1] % groups == 0 and num_bytes >= groups * LEAST_BYTES))  # fmt: skip

    def _started(self, rows: Tensor, send: list[int], receive: list[int]) -> "Transfer":
        self.ranks.check()
        found, rows = rows.new_empty(sum(receive), rows.shape[1]), rows.contiguous()
        work = dist.all_to_all_single(found, rows, receive, send, group=self.ranks.group, async_op=True)
        self.ranks.sent_bytes += rows.numel() * rows.element_size()
        return Transfer(found, work)


# Attention of one group of heads runs while the keys of the next one are on their way. Small exchanges are not worth the calls.
MOST_GROUPS = 4
LEAST_BYTES = 1 << 20  # that the rank which receives most receives for one group


@dataclass
class Transfer:
    """Rows on their way to this rank."""

    rows: Tensor
    work: Any

    def arrived(self) -> Tensor:
        self.work.wait()
        return self.rows


class Exchange:
    """Exchanges by a Route of columns of the same rows, which begin together and arrive one after another. `forwards` are the
    transfers of the forward pass by group, `backwards` those of their gradients, which begin last to first. What has arrived is
    not kept, since the graph may live longer."""

    def __init__(self, route: Route, groups: int) -> None:
        self.route, self.groups = route, groups
        self.forwards: dict[int, Transfer] = {}
        self.backwards: list[Transfer] = []

    def send(self, turn: Tensor, *tensors: Tensor) -> list[Tensor]:
        """[turn, then what has not yet arrived of each group]. tensors: of the sources of the route, each of which has so many
        tensors [N, K, ...] beside one another. Group g has the g-th part of their K heads; elements of a row follow one another.
        `turn` is a number that one exchange passes to the next: so all ranks run the same exchanges in backward, in reverse
        order, whatever else depends on them."""
        return list(_Send.apply(turn, self, *tensors))  # type: ignore[no-untyped-call]

    def receive(self, turn: Tensor, group: int, pending: Tensor) -> tuple[Tensor, Tensor]:
        """(turn, rows [S, W]): what this rank receives of a group."""
        found: tuple[Tensor, Tensor] = _Receive.apply(turn, self, group, pending)  # type: ignore[no-untyped-call]
        return found


class _Send(torch.autograd.Function):
    """Begins all transfers. In backward it waits for those of gradients; gradients of a row that several ranks have read are
    summed, in float32 at least."""

    @staticmethod
    def forward(ctx: Any, turn: Tensor, exchange: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, route = exchange, exchange.route
        ctx.like = [(tensor.shape, tensor.dtype) for tensor in tensors]
        ctx.set_materialize_grads(False)
        sources = [[tensor.index_select(0, pick).chunk(exchange.groups, 1) for tensor in tensors_of_source]
                   for pick, tensors_of_source in _sources(route, tensors)]  # fmt: skip
        for group in range(exchange.groups):
            picked = [torch.cat([parts[group].flatten(1) for parts in source], 1) for source in sources]
            rows = torch.cat(picked) if len(picked) > 1 else picked[0]
            exchange.forwards[group] = route.forwards(rows if route.order is None else rows.index_select(0, route.order))
        return turn.clone(), *(transfer.rows for transfer in exchange.forwards.values())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, turn: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        exchange: Exchange = ctx.exchange
        route, groups = exchange.route, exchange.groups
        arrived = [transfer.arrived() for transfer in reversed(exchange.backwards)]
        exchange.backwards.clear()
        if route.order is not None:
            arrived = [torch.empty_like(rows).index_copy_(0, route.order, rows) for rows in arrived]
        found: list[Tensor | None] = []
        by_source = zip(*(rows.split([len(pick) for pick in route.picks]) for rows in arrived))
        for parts, (pick, like) in zip(by_source, _sources(route, ctx.like)):
            widths = [shape[1:].numel() // groups for shape, _ in like]
            columns = zip(*(part.split(widths, 1) for part in parts))
            found += [_summed(gradients, pick, shape, dtype) for gradients, (shape, dtype) in zip(columns, like)]
        return turn, None, *found


class _Receive(torch.autograd.Function):
    """Waits for one transfer. In backward it begins that of the gradients."""

    @staticmethod
    def forward(ctx: Any, turn: Tensor, exchange: Exchange, group: int, pending: Tensor) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        exchange.forwards.pop(group).arrived()
        return turn.clone(), pending.view_as(pending)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, turn: Tensor, gradient: Tensor) -> tuple[Tensor | None, ...]:
        exchange: Exchange = ctx.exchange
        exchange.backwards.append(exchange.route.backwards(gradient))
        return turn, None, None, None


def _sources(route: Route, values: Sequence[Any]) -> list[tuple[Tensor, Sequence[Any]]]:
    """(pick, values) of each source."""
    count = len(values) // len(route.picks)
    return [(pick, values[number * count : (number + 1) * count]) for number, pick in enumerate(route.picks)]


def _summed(groups: Sequence[Tensor], pick: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
    """groups: by group the gradients of its heads, rows [len(pick), W / groups]."""
    if len(pick) == 0:
        return None
    wide = torch.promote_types(dtype, torch.float32)
    rows = torch.cat(list(groups), 1) if len(groups) > 1 else groups[0]
    sums = rows.new_zeros(shape[0], rows.shape[1], dtype=wide)
    return sums.index_add_(0, pick, rows.to(wide)).to(dtype).view(shape)
