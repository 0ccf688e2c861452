# SPDX-License-Identifier: Apache-2.0
"""A rank's shard of a micro-batch on its way through a model: in every layer it reads what others have computed there."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..native import core
from ..rank_group import RankGroup
from .asked_attention import in_groups
from .context import ContextRun, Frame
from .exchange import Exchange, Integers, Route, Swap
from .mixers import Recurrence
from .run import Contexts, Shard


@dataclass(frozen=True)
class First:
    """The tokens that other ranks continue, and those before them on this rank.

    tokens   [N] int64 ascending, in the shard
    prev     [N] int32: among these; -1 at a root, and where a path comes from another rank; -2 - n where a token continues the
             state n of the parent
    open     [N] int32: likewise, but -2 where a path comes from another rank, and -1 at all other beginnings
    ends     [E] int64: those of the tokens that others continue
    """

    tokens: Integers
    prev: NDArray[np.int32]
    open: NDArray[np.int32]
    ends: Integers


@dataclass(frozen=True)
class Scan:
    """What one rank does.

    from_parent  swap of the states of the parent's frame; None without a parent
    own          int64: rows of that frame that it reads itself; states are these, and then what is received
    first        what it computes first
    swap         of A and B of the `ends` of `first`; None where no rank continues another
    kept         int64: which rows of this rank are needed; known are these, and then what is received
    levels       [(which, before)] int64 each: in this order, what is known at `which` goes on from the states at `before`
    entering     int64: which of the known states its tokens continue, after those of the parent
    prev         [T] int32 of the shard: -2 - n where a token continues the state n
    ends         [C] int64: the tokens of the shard whose states go to the frame
    """

    from_parent: Swap | None
    own: Integers
    first: First
    swap: Swap | None
    kept: Integers
    levels: list[tuple[Integers, Integers]]
    entering: Integers
    prev: NDArray[np.int32]
    ends: Integers


@dataclass(frozen=True)
class PartPlan:
    """What a PartRun is made of, as step.division.Division has it for a micro-batch.

    shard   what this rank has of it
    keys    what attention reads, by window and chunk
    scan    of recurrences
    group   the ranks that have the other shards
    """

    shard: Shard
    keys: Callable[[int, int], core.KeyReads]
    scan: Callable[[], Scan]
    group: RankGroup


class PartRun(ContextRun):
    """A ContextRun of one shard. `frames` and `parent` are those of this rank, whose rows other ranks read as well."""

    def __init__(self, plan: PartPlan, device: torch.device, backend: str, *, frames: Sequence[Frame], parent: Frame | None,
                 is_read: bool) -> None:  # fmt: skip
        shard = plan.shard
        super().__init__(shard, device, backend, prev=shard.prev, reads=None, frames=frames, parent=parent,
                         ends=np.zeros(0, np.int64) if is_read else None)  # fmt: skip
        self.longest = shard.longest
        self._plan, self._device = plan, device
        self._keys: dict[tuple[int, int], tuple[Route, Tensor, Tensor]] = {}
        self._scans: list[_ScanTensors] = []  # one, once a layer has asked for it
        self._turns = [torch.zeros((), device=device, requires_grad=torch.is_grad_enabled())]

    @property
    def turn(self) -> Tensor:
        return self._turns[-1]

    def attention_contexts(self, key: Tensor, value: Tensor, window: int, chunk: int) -> Contexts:
        if (window, chunk) not in self._keys:
            reads = self._plan.keys(window, chunk)
            swap = Swap(reads.picks, reads.order, reads.send, reads.receive, reads.most_received)
            self._keys[window, chunk] = (Route(swap, self._plan.group, self._device), torch.from_numpy(reads.blocks),
                                         torch.from_numpy(reads.positions))  # fmt: skip
        route, blocks, positions = self._keys[window, chunk]
        keys, values = ([self._left_by(frame, name) for frame in self._frames] for name in ("key", "value"))
        if not route.is_needed and not keys:
            return [dict]
        groups = route.head_groups(key, value) if route.is_needed else 1
        exchange = Exchange(route, groups)
        pairs = [tensor for pair in zip([*keys, key], [*values, value]) for tensor in pair]
        pending = self._send(exchange, *pairs) if route.is_needed else []
        context_groups = [[in_groups(tensor, groups, 1) for tensor in tensors] for tensors in (keys, values)]

        def context(head_group: int) -> dict[str, Any]:
            context_k, context_v = ([tensor[head_group] for tensor in tensors] for tensors in context_groups)
            if pending:
                shapes = [(tensor.shape[1] // groups, tensor.shape[2]) for tensor in (key, value)]
                rows = self._receive(exchange, head_group, pending[head_group])
                received = rows.split([heads * size for heads, size in shapes], 1)
                context_k.append(received[0].unflatten(1, shapes[0]))
                context_v.append(received[1].unflatten(1, shapes[1]))
            return {"context_k": context_k, "context_v": context_v, "context_blocks": blocks, "context_positions": positions}

        return [functools.partial(context, number) for number in range(groups)]

    def along_paths(self, name: str, recurrence: Recurrence) -> Tensor:
        if not self._scans:
            self._scans.append(_ScanTensors(self._plan.scan(), self._plan.group, self._device))
        scan = self._scans[0]
        parent_states = self._from_parent(scan, self.inherited(name))
        entering = self._entering(scan, recurrence, parent_states)
        states = [each for each in (parent_states, entering) if each is not None and len(each)]
        out, left = recurrence.call(None, scan.prev, torch.cat(states) if states else None, scan.ends)
        assert left is not None  # for the ends that it was given
        self.leave(**{name: left})
        return out

    def _from_parent(self, scan: "_ScanTensors", held: Tensor | None) -> Tensor | None:
        """States of the parent's ends that tokens of this rank continue."""
        if held is None or scan.from_parent is None:
            return None
        rows = [held.index_select(0, scan.own)]
        if scan.from_parent.is_needed:
            rows.append(self._exchange(scan.from_parent, held).unflatten(1, held.shape[1:]))
        states = torch.cat(rows)
        return states if len(states) else None

    def _entering(self, scan: "_ScanTensors", recurrence: Recurrence, parent_states: Tensor | None) -> Tensor | None:
        """States with which paths come from other ranks."""
        if scan.swap is None:
            return None
        states, factors = recurrence.like, recurrence.like_factors
        if len(scan.first_tokens):
            _, ends = recurrence.call(scan.first_tokens, scan.first_prev, parent_states, scan.first_ends)
            assert ends is not None  # for the ends that it was given
            states, factors = ends, factors.new_zeros(len(ends), *factors.shape[1:])
            if scan.is_open:
                factors = recurrence.factors(scan.first_tokens, scan.first_open, scan.first_ends)
        known = [each.index_select(0, scan.kept) for each in (states, factors)]
        if scan.swap.is_needed:
            sizes = [each.shape[1:].numel() for each in known]
            received = self._exchange(scan.swap, states, factors).split(sizes, 1)
            known = [torch.cat([own, other.unflatten(1, own.shape[1:])]) for own, other in zip(known, received)]
        states, factors = known
        for which, before in scan.levels:
            moved = recurrence.moved(factors.index_select(0, which), states.index_select(0, before))
            states = states.index_add(0, which, moved)
        return states.index_select(0, scan.entering)

    def _exchange(self, route: Route, *tensors: Tensor) -> Tensor:
        exchange = Exchange(route, 1)
        (pending,) = self._send(exchange, *tensors)
        return self._receive(exchange, 0, pending)

    def _send(self, exchange: Exchange, *tensors: Tensor) -> list[Tensor]:
        turn, *pending = exchange.send(self.turn, *tensors)
        self._pass(turn)
        return pending

    def _receive(self, exchange: Exchange, head_group: int, pending: Tensor) -> Tensor:
        turn, rows = exchange.receive(self.turn, head_group, pending)
        self._pass(turn)
        return rows

    def _pass(self, turn: Tensor) -> None:
        if torch._C._current_graph_task_id() == -1:  # what backward computes again is no part of the graph
            self._turns[:] = [turn]


class _ScanTensors:
    """A Scan as tensors: rows and tokens on the device of the model, what operators walk by on the CPU."""

    def __init__(self, scan: Scan, group: RankGroup, device: torch.device) -> None:
        def there(numbers: Integers) -> Tensor:
            return torch.from_numpy(numbers).to(device)

        self.from_parent, self.swap = (None if swap is None else Route(swap, group, device)
                                       for swap in (scan.from_parent, scan.swap))  # fmt: skip
        self.own, self.kept, self.entering = there(scan.own), there(scan.kept), there(scan.entering)
        self.first_tokens = there(scan.first.tokens)
        self.levels = [(there(which), there(before)) for which, before in scan.levels]
        self.first_prev, self.first_open, self.first_ends, self.prev, self.ends = map(
            torch.from_numpy, (scan.first.prev, scan.first.open, scan.first.ends, scan.prev, scan.ends))
        self.is_open = bool((scan.first.open < -1).any())
