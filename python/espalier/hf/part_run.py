# SPDX-License-Identifier: Apache-2.0
"""A rank's part of a micro-batch on its way through a model: in every layer it reads what others have computed there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..rank_group import RankGroup
from ..trees import Layout
from .context import ContextRun, Frame
from .exchange import Exchange, Route, Swap
from .run import PathCall

Integers = NDArray[np.int64]


class Stage(Protocol):
    """As step.division.Stage has it."""

    @property
    def swap(self) -> Swap | None: ...

    @property
    def own(self) -> Integers: ...

    @property
    def tokens(self) -> Integers: ...

    @property
    def prev(self) -> NDArray[np.int32]: ...

    @property
    def ends(self) -> Integers: ...

    @property
    def left(self) -> Integers: ...


class KeyReads(Protocol):
    """As step.division.KeyReads has it."""

    @property
    def swap(self) -> Swap: ...

    @property
    def blocks(self) -> Integers: ...

    @property
    def positions(self) -> Integers: ...


@dataclass(frozen=True)
class PartPlan:
    """What a PartRun is made of, as step.division.Division has it for a micro-batch.

    part    a step.division.Part, which has what layers ask of a Layout
    keys    what attention reads, by window and chunk
    stages  of recurrences
    group   the ranks that have the other parts
    """

    part: Any
    keys: Callable[[int, int], KeyReads]
    stages: Callable[[], Sequence[Stage]]
    group: RankGroup


class PartRun(ContextRun):
    """A ContextRun of one part. `frames` and `parent` are those of this rank, whose rows other ranks read as well."""

    def __init__(self, plan: PartPlan, device: torch.device, backend: str, *, frames: Sequence[Frame], parent: Frame | None,
                 is_read: bool) -> None:  # fmt: skip
        layout: Layout = plan.part
        super().__init__(layout, device, backend, prev=plan.part.prev, reads=None, frames=frames, parent=parent,
                         ends=np.zeros(0, np.int64) if is_read else None)  # fmt: skip
        self.longest = plan.part.longest
        self._plan, self._device = plan, device
        self._keys: dict[tuple[int, int], tuple[Route, Tensor, Tensor]] = {}
        self._schedules: list[_Schedule] = []  # one, once a layer has asked for it
        self._turns = [torch.zeros((), device=device, requires_grad=torch.is_grad_enabled())]

    @property
    def turn(self) -> Tensor:
        return self._turns[-1]

    def attention_context(self, key: Tensor, value: Tensor, window: int, chunk: int) -> dict[str, Any]:
        if (window, chunk) not in self._keys:
            reads = self._plan.keys(window, chunk)
            self._keys[window, chunk] = (Route(reads.swap, self._plan.group, self._device), torch.from_numpy(reads.blocks),
                                         torch.from_numpy(reads.positions))  # fmt: skip
        route, blocks, positions = self._keys[window, chunk]
        keys, values = ([self._left_by(frame, name) for frame in self._frames] for name in ("key", "value"))
        if route.is_needed:
            pairs = [tensor for pair in zip([*keys, key], [*values, value]) for tensor in pair]
            received = self._exchange(route, *pairs).split([key.shape[1] * key.shape[2], value.shape[1] * value.shape[2]], 1)
            keys.append(received[0].unflatten(1, key.shape[1:]))
            values.append(received[1].unflatten(1, value.shape[1:]))
        return {"context_k": keys, "context_v": values, "context_blocks": blocks,
                "context_positions": positions} if keys else {}  # fmt: skip

    def along_paths(self, name: str, call: PathCall, like: Tensor) -> Tensor:
        if not self._schedules:
            self._schedules.append(_Schedule(self._plan, self._device))
        outputs, left, held = [], [], self.inherited(name)
        for stage in self._schedules[0].stages:
            states, held = self._states(stage, held), like
            if len(stage.tokens):
                out, held = call(stage.tokens, stage.prev, states, stage.ends)
                outputs.append(out)
                assert held is not None  # for the ends that it was given
            left.append(held.index_select(0, stage.left))
        self.leave(**{name: torch.cat(left)})
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs).index_select(0, self._schedules[0].places)

    def _states(self, stage: "_StageTensors", held: Tensor | None) -> Tensor | None:
        """What the tokens of a stage continue, of what all ranks hold: ends of the stage before, or of the parent."""
        if held is None or stage.route is None:
            return None
        rows = [held.index_select(0, stage.own)]
        if stage.route.is_needed:
            rows.append(self._exchange(stage.route, held).unflatten(1, held.shape[1:]))
        states = torch.cat(rows)
        return states if len(states) else None

    def _exchange(self, route: Route, *tensors: Tensor) -> Tensor:
        turn: Tensor
        rows: Tensor
        turn, rows = Exchange.apply(self.turn, route, *tensors)  # type: ignore[no-untyped-call]
        if torch._C._current_graph_task_id() == -1:  # what backward computes again is no part of the graph
            self._turns[:] = [turn]
        return rows


class _Schedule:
    """The stages of recurrences, and the places [T] of the part's tokens among those of all stages."""

    def __init__(self, plan: PartPlan, device: torch.device) -> None:
        self.stages = [_StageTensors(stage, plan.group, device) for stage in plan.stages()]
        self.places = torch.argsort(torch.cat([stage.tokens for stage in self.stages]))


class _StageTensors:
    """A Stage as tensors: route, own and left on the device of the model, prev and ends on the CPU."""

    def __init__(self, stage: Stage, group: RankGroup, device: torch.device) -> None:
        self.route = None if stage.swap is None else Route(stage.swap, group, device)
        self.own, self.tokens, self.left = (torch.from_numpy(of).to(device) for of in (stage.own, stage.tokens, stage.left))
        self.prev, self.ends = torch.from_numpy(stage.prev), torch.from_numpy(stage.ends)
