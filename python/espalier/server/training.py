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

from ..errors import InputError
from ..native import core
from .base import Adapter, Base, Counter, LoraSettings, refused_as_user
from .data import Datum, Rows, output_of
from .errors import Refused
from .futures import Failure, Future, Futures
from .losses import RequestLoss
from .requests import Adam

WINDOW_SECONDS = 0.01
MAX_OPERATIONS = 4096  # of a model that wait


@dataclass
class Operation:
    """A request to a model. Its `work` runs on the thread of the base, and returns the result."""

    future: Future
    work: Callable[["Model"], bytes | dict[str, Any]] | None = None
    passes: "Passes | None" = None  # instead of work, where it is a forward or backward pass
    result: bytes | dict[str, Any] | Failure | None = None


@dataclass
class Passes:
    """A forward request, or forward and backward."""

    data: list[Datum]
    loss: RequestLoss
    forward_only: bool
    arrived: float = field(default_factory=time.monotonic)


class Model:
    """One model in training.

    Args:
        model_id: SESSION:train:NUMBER.
        base: On which it stands.
        lora: Its settings.
        adapter: Its weights; None until it is made.
        futures: Of the server.
        counter: Of the server.
    """

    def __init__(self, model_id: str, base: Base, lora: LoraSettings, futures: Futures, counter: Counter) -> None:
        self.model_id = model_id
        self.base = base
        self.lora = lora
        self.adapter: Adapter | None = None
        self.published: Adapter | None = None  # what inflight samplers use
        self._futures = futures
        self._counter = counter
        self._waiting: dict[int, Operation] = {}
        self._next = 1
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, seq_id: int, operation: Operation) -> None:
        """An operation with its place in the order. Raises Refused."""
        if seq_id < self._next or seq_id in self._waiting:
            raise Refused(f"seq_id: expected a number from {self._next} on that was not used yet, received {seq_id}", 409)
        if len(self._waiting) >= MAX_OPERATIONS:
            raise Refused(f"expected at most {MAX_OPERATIONS} waiting requests to a model, received one more", 429)
        self._waiting[seq_id] = operation
        self.base.wake()

    def has(self, seq_id: int) -> bool:
        return seq_id in self._waiting

    def fail_all(self, message: str) -> None:
        """Ends what waits."""
        for operation in self._waiting.values():
            self._futures.finish(operation.future, Failure(message, "user"))
        self._waiting.clear()

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
        self._timer = asyncio.get_running_loop().call_later(left, self.base.wake)
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
        try:
            if self._operations[0].passes is not None:
                self._run_passes()
            else:
                operation = self._operations[0]
                assert operation.work is not None
                operation.result = operation.work(self._model)
        except Exception as error:
            for operation in self._operations:
                operation.result = Failure(_message(error), "user" if refused_as_user(error) else "server")

    def finish(self) -> None:
        for operation in self._operations:
            assert operation.result is not None
            self._futures.finish(operation.future, operation.result)

    def _run_passes(self) -> None:
        passes = [operation.passes for operation in self._operations if operation.passes is not None]
        rows = Rows([datum for each in passes for datum in each.data])
        base = self._model.base
        base.use(self._model.adapter)
        assert self._model.adapter is not None
        self._model.adapter.has_gradients |= not passes[0].forward_only
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

        metrics = self._model.base.engine.forward_backward(rows.rows, loss)
        return (rows.per_datum(seen["logprobs"], lambda columns: np.stack(columns, 1)), seen["losses"],
                metrics["encoded_tokens"])  # fmt: skip

    def _forward(self, rows: Rows, passes: list[Passes]) -> Any:
        import torch

        values = [np.asarray(row[1:], np.float64) for row in self._model.base.engine.logprobs(rows.rows)]
        losses = [float(value) for value in self._losses(rows, passes, [torch.from_numpy(row) for row in values])]
        forest = core.build_forest(rows.rows.offsets, rows.rows.input_ids)
        return rows.per_datum(values, lambda columns: np.stack(columns, 1)), losses, forest.tree_tokens


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, InputError | Refused) else f"{type(error).__name__}: {error}"


def optim_step(adam: Adam) -> Callable[[Model], dict[str, Any]]:
    """The work of an optimiser step."""

    def work(model: Model) -> dict[str, Any]:
        model.base.use(model.adapter)
        done = model.base.engine.optim_step(
            adam.learning_rate, beta1=adam.beta1, beta2=adam.beta2, eps=adam.eps, weight_decay=adam.weight_decay,
            max_grad_norm=adam.grad_clip_norm)  # fmt: skip
        assert model.adapter is not None
        model.adapter.has_gradients = False
        return {"metrics": {name: float(value) for name, value in done.items()}}

    return work
