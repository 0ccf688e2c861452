# SPDX-License-Identifier: Apache-2.0
"""One pass over the micro-batches of a Step: in which order they run forward and backward, and what is kept between."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import InputError
from ..hf.context import ContextRun, Frame
from ..hf.dropout import Draws
from ..hf.micro_batch import MicroBatchModel
from ..hf.part_run import PartPlan, PartRun
from ..hf.routes import check_replayed
from ..rank_group import RankGroup
from .division import Division
from .plan import StepPlan, Terms


@dataclass(frozen=True)
class Divided:
    """Micro-batches that the ranks of a group run together, each its shard."""

    division: Division
    group: RankGroup
    recompute: bool

    def digest(self) -> str:
        """What has to be the same on these ranks, as text."""
        return f"{self.division.digest()}, recompute={self.recompute}"


StepTerms = Terms[Tensor]
Compute = Callable[[Tensor, StepTerms], tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class StepBatch:
    """A micro-batch of an espalier.Step and its M terms: a term is a token of one row that carries loss.

    Attributes:
        index: Its place in the plan.
        rows: [M] int64, on the device of the model: the row of each term, ascending.
        positions: [M] int64: of the predicted token in its row, from 1.
        weights: [M] float32 (float64 for float64 models): of the terms by loss_mask, 1 without one.
    """

    index: int
    rows: Tensor
    positions: Tensor
    _weights: Tensor

    @property
    def weights(self) -> Tensor:
        """[M]: by loss_mask."""
        object.__setattr__(self, "_gave_weights", True)
        return self._weights

    @property
    def num_terms(self) -> int:
        """M"""
        return len(self.rows)

    def __repr__(self) -> str:
        return f"<espalier.StepBatch {self.index}: {self.num_terms} terms>"


class Pass:
    """One loop over a Step. With gradients (`is_training`, as when the loop began) a micro-batch runs backward after
    its descendants; without, there is only the forward pass.

    `walk` presents every micro-batch with terms once; micro-batches without terms that others go on from run by
    themselves. With `recompute` those that others go on from run forward twice: at first for their context alone.

    frames  of the open micro-batches that others go on from, by number: those on one path of the plan"""

    def __init__(self, model: MicroBatchModel, step_plan: StepPlan, recompute: bool, synchronise: Callable[[], None],
                 routes: Tensor | None = None, divided: Divided | None = None) -> None:  # fmt: skip
        self.is_training = torch.is_grad_enabled()
        self.frames: dict[int, Frame] = {}
        self._model, self._plan, self._recompute, self._synchronise = model, step_plan, recompute, synchronise
        self._routes, self._divided = routes, divided
        self._current: _Opened | None = None
        self._is_closed = False
        self._num_begun = self._num_done = 0  # micro-batches whose backward pass has begun, and is over
        self._autocast, self._versions = self._autocast_now(), model.versions()

    def walk(self) -> Iterator[StepBatch]:
        """Yields StepBatches."""
        opened: list[_Opened] = []
        for index in self._plan.running:
            while opened and opened[-1].index != self._plan.parent[index]:
                yield from self._leave(opened.pop())
            opened.append(_Opened(index))
            yield from self._enter(opened[-1])
        while opened:
            yield from self._leave(opened.pop())

    def close(self) -> bool:
        """Lets everything go; what is called later is refused. Returns whether this ended a loop with gradients of some
        micro-batches in `.grad` and without those of others."""
        was_open, is_whole = not self._is_closed, self._num_done == len(self._plan.running)
        self._is_closed, self._current = True, None
        for frame in self.frames.values():
            frame.free()
        self.frames.clear()
        return was_open and self._num_begun > 0 and not is_whole

    def progress(self) -> str:
        """How many of its micro-batches have run backward, as text."""
        return f"{self._num_done} of {len(self._plan.running)} micro-batches"

    def outputs(self, batch: StepBatch, compute: Compute) -> tuple[Tensor, ...]:
        """A tuple of what `compute(hidden [T, H], terms)` gives for the micro-batch that is presented."""
        opened = self._presented(batch)
        if opened.outputs is not None:
            raise InputError(f"micro-batch {batch.index}: expected one forward pass, received another call; ask for "
                             "everything at once")  # fmt: skip
        if self._autocast_now() != self._autocast:
            raise InputError("autocast: expected the whole loop `for batch in step` under torch.autocast, received "
                             "another setting inside of the loop")  # fmt: skip
        terms = opened.terms
        assert terms is not None  # of what is presented
        results = self._forward(opened, lambda hidden: compute(hidden, terms))
        outputs: tuple[Tensor, ...] = _Gate.apply(opened.turn, *results)  # type: ignore[no-untyped-call]
        opened.outputs = outputs
        return outputs

    def backward(self, loss: Tensor) -> None:
        opened = self._current
        if self._is_closed or opened is None:
            raise InputError("espalier.Step.backward: expected a call inside of `for batch in step`, received one "
                             "outside")  # fmt: skip
        if not self.is_training:
            raise InputError("espalier.Step.backward: expected a loop with gradients, received one that began under "
                             "torch.no_grad()")  # fmt: skip
        if opened.outputs is None:
            raise InputError(f"micro-batch {opened.index}: expected step.logprobs(batch) before step.backward(loss)")
        if opened.loss is not None or opened.is_done:
            raise InputError(f"micro-batch {opened.index}: expected one step.backward(loss), received another; add the "
                             "losses up")  # fmt: skip
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise InputError(f"loss: expected one number with a graph, received {_described(loss)}")
        if self._plan.is_weighted and not hasattr(opened.batch, "_gave_weights"):
            raise InputError(f"micro-batch {opened.index}: expected a loss of batch.weights, since loss_mask has numbers "
                             "other than 0 and 1, received one without; multiply the terms by them, or give a mask of "
                             "0 and 1")  # fmt: skip
        opened.loss = loss
        if self._recompute or not self._plan.children(opened.index):
            self._backward(opened)

    def _presented(self, batch: StepBatch) -> "_Opened":
        if self._is_closed or self._current is None or self._current.batch is not batch:
            raise InputError(f"expected the micro-batch that `for batch in step` gave last, received {batch!r}")
        return self._current

    def _enter(self, opened: "_Opened") -> Iterator[StepBatch]:
        if not (self.is_training and self._recompute):
            yield from self._present(opened)
        elif self._plan.children(opened.index):
            draws = Draws(self._model.device) if self._model.has_dropout else None
            with torch.no_grad():
                self._forward(opened, lambda hidden: hidden)
            opened.draws = draws

    def _leave(self, opened: "_Opened") -> Iterator[StepBatch]:
        if self.is_training:
            if self._recompute:
                yield from self._present(opened)
            if not opened.is_done:
                self._backward(opened)
        if opened.index in self.frames:
            self.frames.pop(opened.index).free()

    def _present(self, opened: "_Opened") -> Iterator[StepBatch]:
        """Lets the user run a micro-batch forward, and give its loss; those without terms run by themselves."""
        if not self._plan.num_terms[opened.index]:
            with torch.set_grad_enabled(self.is_training):
                opened.outputs = (self._forward(opened, lambda hidden: hidden),)
            return
        opened.terms = self._terms(opened.index)
        opened.batch = StepBatch(opened.index, opened.terms.rows, opened.terms.positions, opened.terms.weights)
        self._current = opened
        yield opened.batch
        self._current = None
        if opened.outputs is None:
            raise InputError(f"micro-batch {opened.index}: expected step.logprobs(batch) before the next micro-batch, "
                             "received none")  # fmt: skip
        if self.is_training and opened.loss is None and not opened.is_done:
            raise InputError(f"micro-batch {opened.index}: expected step.backward(loss) before the next micro-batch, "
                             "received none; without a loss, give its log-probabilities times zero")  # fmt: skip
        opened.batch = None

    def _terms(self, index: int) -> StepTerms:
        if self._divided is not None:
            terms = self._divided.division.terms(index)
        else:
            terms = self._plan.terms(index, self._plan.layout(index))
        tensors = {field.name: torch.from_numpy(getattr(terms, field.name)) for field in fields(terms)}
        tensors["weights"] = tensors["weights"].to(self._model.dtype_of_sums)
        return StepTerms(**{name: tensor.to(self._model.device) for name, tensor in tensors.items()})

    def _forward(self, opened: "_Opened", result: Callable[[Tensor], Any]) -> Any:
        """Runs a micro-batch, and makes its frame where others go on from it."""
        plan, index = self._plan, opened.index
        self._check_parameters(index)
        has_readers = len(plan.children(index)) > 0
        run, ids = self._run(index, has_readers) if self._divided is None else self._part(self._divided, index, has_readers)
        input_ids = torch.tensor(ids, device=self._model.device, dtype=torch.int64)
        with contextlib.nullcontext() if opened.draws is None else opened.draws.again():
            outputs = self._model(run, input_ids, result)
        check_replayed(run)
        opened.run, opened.live = run, run.take()
        if has_readers and index not in self.frames:
            self.frames[index] = Frame(opened.live, self.is_training)
        return outputs

    def _run(self, index: int, has_readers: bool) -> tuple[ContextRun, NDArray[np.int32]]:
        """(run, its tokens) of a micro-batch."""
        plan = self._plan
        layout, reads = plan.layout(index), plan.context(index)
        run = ContextRun(
            layout, self._model.device, self._model.backend, prev=plan.prev(index, layout), reads=reads,
            frames=[self.frames[ancestor] for ancestor in reads.ancestors], parent=self.frames.get(plan.parent[index]),
            ends=plan.ends(index) if has_readers else None)  # fmt: skip
        if self._routes is not None:
            run.routes = plan.routes(self._routes, layout).to(self._model.device)
        return run, layout.input_ids

    def _part(self, divided: Divided, index: int, has_readers: bool) -> tuple[ContextRun, NDArray[np.int32]]:
        """The same for this rank's shard of it."""
        division, plan = divided.division, self._plan
        shard = division.shard(index)
        planned = PartPlan(shard, functools.partial(division.keys, index), functools.partial(division.scan, index),
                           divided.group)  # fmt: skip
        run = PartRun(
            planned, self._model.device, self._model.backend, parent=self.frames.get(plan.parent[index]), is_read=has_readers,
            frames=[self.frames[ancestor] for ancestor in plan.context(index).ancestors])  # fmt: skip
        if self._routes is not None:
            all_routes = plan.routes(self._routes, plan.layout(index))
            run.routes = all_routes[:, torch.from_numpy(shard.tokens)].to(self._model.device)
        return run, shard.input_ids

    def _backward(self, opened: "_Opened") -> None:
        """Backward from the loss and from the gradients that descendants have left in the frame."""
        self._check_parameters(opened.index)
        if opened.loss is None:  # zeros, so that all hooks of modules run
            roots = [output for output in opened.outputs or () if output.requires_grad]
            gradients: list[Tensor | None] = [torch.zeros_like(root) for root in roots]
        else:
            roots, gradients = [opened.loss], [None]
        if opened.index in self.frames and opened.live is not None:
            tensors, left = self.frames[opened.index].seeds(opened.live)
            roots, gradients = [*roots, *tensors], [*gradients, *left]
        if opened.run is not None and opened.run.turn is not None:
            roots, gradients = [*roots, opened.run.turn], [*gradients, torch.zeros_like(opened.run.turn)]
        if opened.index == self._plan.last:
            self._synchronise()
        self._num_begun += 1
        opened.turn.is_on = True
        try:
            if roots:
                torch.autograd.backward(roots, gradients)
        finally:
            opened.turn.is_on = False
        for frame in self.frames.values():
            frame.collect()
        self._num_done += 1
        opened.finish()

    def _check_parameters(self, index: int) -> None:
        if self._model.versions() != self._versions:
            raise InputError(f"micro-batch {index}: expected the parameters as they were when the loop began, received "
                             "changed ones; call optimizer.step() after the loop")  # fmt: skip

    def _autocast_now(self) -> bool | torch.dtype:
        kind = self._model.device.type
        return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)


@dataclass(eq=False)
class _Opened:
    """A micro-batch between its first forward pass and its backward pass."""

    index: int
    is_done: bool = False
    batch: StepBatch | None = None
    terms: StepTerms | None = None
    run: ContextRun | None = None
    live: dict[tuple[int, str], Tensor] | None = None
    outputs: tuple[Tensor, ...] | None = None
    loss: Tensor | None = None
    draws: Draws | None = None  # of its first forward pass, for a second

    def __post_init__(self) -> None:
        self.turn = _Turn(self.index)

    def finish(self) -> None:
        if self.run is not None:
            self.run.release()
        self.run = self.live = self.terms = self.loss = None
        self.outputs, self.is_done = (), True


@dataclass
class _Turn:
    """Whether it is a micro-batch's turn to run backward."""

    index: int
    is_on: bool = False


class _Gate(torch.autograd.Function):
    """The identity of some tensors, through which gradients pass at the micro-batch's turn only."""

    @staticmethod
    def forward(ctx: Any, turn: _Turn, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.turn = turn
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.turn.is_on:
            raise InputError(f"micro-batch {ctx.turn.index}: expected gradients from the loss that step.backward(loss) "
                             "was given for it, received others, of another micro-batch's loss or of loss.backward(); "
                             "detach what losses share")  # fmt: skip
        return None, *gradients


def _described(loss: object) -> str:
    if not isinstance(loss, torch.Tensor):
        return type(loss).__name__
    return f"a tensor {list(loss.shape)}" + ("" if loss.requires_grad else " without a graph")
