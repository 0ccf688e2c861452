# SPDX-License-Identifier: Apache-2.0
"""Models in training: what clients ask of one is done in the order of its `seq_id`, in as few forests as that allows.

Forward and backward requests that stand next to each other are one forest: those that the client has sent when the engine
becomes free, and those that come within WINDOW_SECONDS after the last one unless another kind of request already follows
them. Chunks of one batch arrive with the first one last, so they are always together.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..native import core
from .base import Counter
from .data import Datum, Rows, output_of
from .errors import Refused
from .futures import Failure, Future, Futures
from .losses import RequestLoss
from .requests import Adam
from .worker import LoraSettings, TrainingWorker, Weights

WINDOW_SECONDS = 0.01
GAP_SECONDS = 300.0    # that operations wait for an earlier one
MAX_OPERATIONS = 4096  # of a model that wait


@dataclass
class Operation:
    """A request to a model. Its `work` runs on the thread of the worker, and returns the result."""

    future: Future
    work: "Work | Passes"
    result: bytes | dict[str, Any] | None = None

    @property
    def passes(self) -> "Passes | None":
        return self.work if isinstance(self.work, Passes) else None


@dataclass
class Passes:
    """A forward request, or forward and backward."""

    data: list[Datum]
    loss: RequestLoss
    forward_only: bool
    arrived: float = field(default_factory=time.monotonic)


Work = Callable[["Model"], dict[str, Any]]


class Model:
    """One model in training.

    Args:
        model_id: SESSION:train:NUMBER.
        worker: That trains it.
        weights: What is trained.
        futures: Of the server.
        counter: Of the server.
    """

    has_begun = False  # a job is all of what it does

    def __init__(self, model_id: str, worker: TrainingWorker, weights: Weights, futures: Futures, counter: Counter) -> None:
        self.model_id = model_id
        self.worker = worker
        self.weights = weights
        self.published: Weights | None = None  # what inflight samplers use
        self._futures = futures
        self._counter = counter
        self._waiting: dict[int, Operation] = {}
        self._next = 1
        self._last_arrival = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def lora(self) -> LoraSettings:
        return self.weights.lora

    def check(self, seq_id: int) -> None:
        """Whether `submit` can take an operation with this number. Raises Refused."""
        if seq_id < self._next:
            raise Refused(f"seq_id: expected a number from {self._next} on, received {seq_id}, whose result has expired", 410)
        if len(self._waiting) >= MAX_OPERATIONS and not self.is_next(seq_id):
            raise Refused(f"expected at most {MAX_OPERATIONS} waiting requests to a model, received one more", 429)

    def is_next(self, seq_id: int) -> bool:
        """Whether those that wait do so for this one: then no limit may refuse it."""
        return seq_id == self._next

    def submit(self, seq_id: int, operation: Operation) -> None:
        """An operation with its place in the order, a new one."""
        self._waiting[seq_id] = operation
        self._last_arrival = time.monotonic()
        self.worker.wake()

    def fail_all(self, message: str) -> None:
        """Ends what waits."""
        for operation in self._waiting.values():
            self._futures.finish(operation.future, Failure(message, "user"))
        self._next = max(self._waiting, default=self._next - 1) + 1
        self._waiting.clear()

    def fail_stalled(self) -> None:
        """Ends what waits for a request that never came: its client could wait for ever."""
        if self._waiting and self._next not in self._waiting and time.monotonic() - self._last_arrival > GAP_SECONDS:
            self.fail_all(f"seq_id: expected {self._next} within {GAP_SECONDS:.0f} seconds, received only later numbers")

    def next_job(self) -> "_Job | None":
        """Of the operations whose turn it is, those that can be done together."""
        taken: list[Operation] = []
        number = self._next
        while (operation := self._waiting.get(number)) is not None:
            if taken and not _together(taken[0], operation):
                break
            taken.append(operation)
            number += 1
            if operation.passes is None:
                break
        if not taken:
            return None
        last = taken[-1].passes
        if last is not None and number not in self._waiting and not self._window_is_over(last):
            return None
        for seq_id in range(self._next, number):
            del self._waiting[seq_id]
        self._next = number
        return _Job(self, taken, self._futures, self._counter)

    def _window_is_over(self, last: Passes) -> bool:
        left = last.arrived + WINDOW_SECONDS - time.monotonic()
        if left <= 0:
            return True
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(left, self.worker.wake)
        return False


def _together(first: Operation, second: Operation) -> bool:
    return (first.passes is not None and second.passes is not None
            and first.passes.forward_only == second.passes.forward_only)  # fmt: skip


class _Job:
    """Operations of a model that are done at once."""

    def __init__(self, model: Model, operations: list[Operation], futures: Futures, counter: Counter) -> None:
        self._model = model
        self._operations = operations
        self._futures = futures
        self._counter = counter

    def run(self) -> None:
        first = self._operations[0]
        if isinstance(first.work, Passes):
            self._run_passes()
        else:
            first.result = first.work(self._model)

    def finish(self) -> None:
        for operation in self._operations:
            assert operation.result is not None
            self._futures.finish(operation.future, operation.result)

    def fail(self, failure: Failure) -> None:
        for operation in self._operations:
            self._futures.finish(operation.future, failure)

    def _run_passes(self) -> None:
        passes = [operation.passes for operation in self._operations if operation.passes is not None]
        rows = Rows([datum for each in passes for datum in each.data])
        weights = self._model.weights
        self._model.worker.use(weights)
        weights.has_gradients |= not passes[0].forward_only
        if passes[0].forward_only:
            logprobs, losses, encoded = self._forward(rows, passes)
        else:
            logprobs, losses, encoded = self._forward_backward(rows, passes)
        begin = 0
        for number, (operation, each) in enumerate(zip(self._operations, passes)):
            end = begin + len(each.data)
            # The client adds up metrics of the requests of a batch, so the first one has the tokens of all.
            counts = {"flat_tokens": float(sum(len(datum.tokens) for datum in each.data)),
                      "encoded_tokens": float(encoded) if number == 0 else 0.0}  # fmt: skip
            self._counter.add(**counts)
            operation.result = output_of(logprobs[begin:end], {
                "loss:sum": losses[number], **{f"espalier/{name}:sum": count for name, count in counts.items()}})  # fmt: skip
            begin = end

    def _losses(self, rows: Rows, passes: list[Passes], logprobs: list[Any]) -> list[Any]:
        import torch

        found = rows.per_datum(logprobs, lambda columns: torch.stack(columns, dim=1))
        values, begin = [], 0
        for each in passes:
            values.append(each.loss.value(found[begin : begin + len(each.data)]))
            begin += len(each.data)
        return values

    def _forward_backward(self, rows: Rows, passes: list[Passes]) -> Any:
        seen: dict[str, Any] = {}

        def loss(logprobs: list[Any], positions: list[Any]) -> Any:
            values = self._losses(rows, passes, logprobs)
            seen["losses"] = [value.item() for value in values]
            seen["logprobs"] = [values.detach().numpy() for values in logprobs]
            return sum(values)

        metrics = self._model.worker.engine.forward_backward(rows.rows, loss)
        return (rows.per_datum(seen["logprobs"], lambda columns: np.stack(columns, 1)), seen["losses"],
                metrics["encoded_tokens"])  # fmt: skip

    def _forward(self, rows: Rows, passes: list[Passes]) -> Any:
        import torch

        values = [np.asarray(row[1:], np.float64) for row in self._model.worker.engine.logprobs(rows.rows)]
        losses = [float(value) for value in self._losses(rows, passes, [torch.from_numpy(row) for row in values])]
        forest = core.build_forest(rows.rows.offsets, rows.rows.input_ids)
        return rows.per_datum(values, lambda columns: np.stack(columns, 1)), losses, forest.tree_tokens


def optim_step(adam: Adam) -> Work:
    """The work of an optimiser step."""

    def work(model: Model) -> dict[str, Any]:
        model.worker.use(model.weights)
        done = model.worker.engine.optim_step(
            adam.learning_rate, beta1=adam.beta1, beta2=adam.beta2, eps=adam.eps, weight_decay=adam.weight_decay,
            max_grad_norm=adam.grad_clip_norm)  # fmt: skip
        model.weights.has_gradients = False
        return {"metrics": {name: float(value) for name, value in done.items()}}

    return work
