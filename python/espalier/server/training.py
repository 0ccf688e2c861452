# SPDX-License-Identifier: Apache-2.0
"""Models in training: what clients ask of one is done in the order of its `seq_id`, in as few forests as that allows.

Forward and backward requests that stand next to each other are one forest: those that the client has sent when the engine
becomes free, and those that come within WINDOW_SECONDS after the last one unless another kind of request already follows
them. Chunks of one batch arrive with the first one last, so they are always together.

Where the worker joins clients, the forests of several adapters that are ready at the same time are passed through the model
together.
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
from .requests import Adam, Request
from .worker import Job, LoraSettings, TrainingWorker, Weights

WINDOW_SECONDS = 0.01
GAP_SECONDS = 300.0    # that operations wait for an earlier one
MAX_OPERATIONS = 4096  # of a model that wait
JOINED_TOKENS = 1024   # of the models that are joined, at most: more gain nothing (bench/training_adapters.py)
PASSES_BYTES = 1 << 30  # of the passes whose gradients no step has used, of a worker


@dataclass
class Operation:
    """A request to a model. Its `work` runs on the thread of the worker, and returns the result. request: what a planned restart
    submits again where `work` is no Passes; a text: why it fails."""

    future: Future
    work: "Work | Passes"
    request: Request | str = ""
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

    @property
    def nbytes(self) -> int:
        """What it takes while it waits."""
        return sum(datum.nbytes for datum in self.data)


Work = Callable[["Model"], dict[str, Any]]


class Model:
    """One model in training. model_id: SESSION:train:NUMBER."""

    clients = 1
    has_begun = False  # a job is all of what it does

    def __init__(self, model_id: str, worker: TrainingWorker, weights: Weights, futures: Futures, counter: Counter,
                 first: int = 1) -> None:  # fmt: skip
        self.model_id = model_id
        self.worker = worker
        self.weights = weights
        self.published: Weights | None = None  # what inflight samplers use
        self._futures = futures
        self._counter = counter
        self._waiting: dict[int, Operation] = {}
        self._next = first
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

    @property
    def next_seq_id(self) -> int:
        """The number of the request that is done next."""
        return self._next

    @property
    def waiting(self) -> dict[int, Operation]:
        """What has not begun, by its number, in order."""
        return dict(sorted(self._waiting.items()))

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

    def next_job(self) -> "Job | None":
        """Of the operations whose turn it is, those that can be done together."""
        job = self._ready_job()
        if job is None or not self.worker.joins_clients or not job.can_be_joined:
            return job
        jobs, room = [job], JOINED_TOKENS - job.flat_tokens
        for model in self.worker.sources:
            if isinstance(model, Model) and model is not self and (other := model._ready_job(room)) is not None:
                jobs.append(other)
                room -= other.flat_tokens
        return job if len(jobs) == 1 else _JoinedJobs(jobs)

    def _ready_job(self, room: int | None = None) -> "_Job | None":
        """`room`: only passes that can be joined with those of other models, of this many tokens at most."""
        taken: list[Operation] = []
        number = self._next
        while (operation := self._waiting.get(number)) is not None:
            if taken and not (taken[0].passes and operation.passes
                              and taken[0].passes.forward_only == operation.passes.forward_only):  # fmt: skip
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
        job = _Job(self, taken, self._futures, self._counter)
        if room is not None and not (job.can_be_joined and job.flat_tokens <= room):
            return None
        for seq_id in range(self._next, number):
            del self._waiting[seq_id]
        self._next = number
        return job

    def _window_is_over(self, last: Passes) -> bool:
        left = last.arrived + WINDOW_SECONDS - time.monotonic()
        if left <= 0:
            return True
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(left, self.worker.wake)
        return False


class _Job:
    """Operations of a model that are done at once."""

    def __init__(self, model: Model, operations: list[Operation], futures: Futures, counter: Counter) -> None:
        self.model = model
        self.operations = operations
        self.passes = [operation.passes for operation in operations if operation.passes is not None]
        self.data = [datum for each in self.passes for datum in each.data]
        self.flat_tokens = sum(len(datum.tokens) for datum in self.data)
        self._futures = futures
        self.counter = counter

    @property
    def can_be_joined(self) -> bool:
        """A failure leaves no gradients, which may cost only what can be computed again."""
        return bool(self.passes) and not self.passes[0].forward_only and not self.model.weights.has_gradients

    def run(self) -> None:
        first = self.operations[0]
        if self.model.weights.lacks_gradients:
            self._repeat_passes()
        if isinstance(first.work, Passes):
            _run_passes([self])
        else:
            first.result = first.work(self.model)

    def _repeat_passes(self) -> None:
        """Computes the gradients of the model again, which no file keeps. Raises Refused, once, where they cannot be."""
        weights = self.model.weights
        forests, weights.passes, weights.lacks_gradients = weights.passes, [], False
        again = "send forward_backward again for what no optim_step has used"
        if forests is None:
            weights.has_gradients = False
            raise Refused(f"the server was started again, and could not keep the gradients of this model: {again}")
        try:
            for passes in forests:
                _run_passes([_Job(self.model, [Operation(Future(""), each) for each in passes], self._futures, Counter())])
        except Exception as error:
            weights.has_gradients, weights.passes = False, []
            raise Refused("the server was started again, and the gradients of this model could not be computed again "
                          f"({error}): {again}") from error  # fmt: skip

    def finish(self) -> None:
        for operation in self.operations:
            assert operation.result is not None
            self._futures.finish(operation.future, operation.result)

    def fail(self, failure: Failure) -> None:
        for operation in self.operations:
            self._futures.finish(operation.future, failure)


class _JoinedJobs:
    """Passes of several models, as one. If that fails, each is done by itself, so that a client gets only its own errors."""

    def __init__(self, jobs: list[_Job]) -> None:
        self._jobs = jobs
        self._failures: dict[int, Failure] = {}

    def run(self) -> None:
        try:
            _run_passes(self._jobs)
        except Exception as joint:
            self._jobs[0].model.worker.failure_of(joint)
            for number, job in enumerate(self._jobs):
                try:
                    job.run()
                except Exception as error:
                    self._failures[number] = job.model.worker.failure_of(error)

    def finish(self) -> None:
        for number, job in enumerate(self._jobs):
            if number in self._failures:
                job.fail(self._failures[number])
            else:
                job.finish()

    def fail(self, failure: Failure) -> None:
        for job in self._jobs:
            job.fail(failure)


def _run_passes(jobs: list[_Job]) -> None:
    """Forward, or forward and backward, of one model or of several adapters."""
    passes = [each for job in jobs for each in job.passes]
    has_backward = not passes[0].forward_only
    before = [job.model.weights.passes for job in jobs]
    for job in jobs:
        weights = job.model.weights
        job.model.worker.use(weights)
        weights.has_gradients |= has_backward  # so it stays in memory
    rows = Rows([datum for each in passes for datum in each.data])
    try:
        logprobs, losses, encoded = (_forward_backward if has_backward else _forward)(jobs, rows, passes)
    except Exception:
        for job, forests in zip(jobs, before):
            if has_backward and forests != []:
                job.model.weights.passes = None  # those before may be there, or cleared
        raise
    if has_backward:
        for job, forests in zip(jobs, before):
            _remember_passes(job, forests)
    begin = number = 0
    for job in jobs:
        # The client adds up metrics of the requests of a batch, so the first one has the tokens of all.
        first_encoded = float(encoded if len(jobs) == 1 else _tree_tokens(Rows(job.data)))
        for operation, each in zip(job.operations, job.passes):
            end = begin + len(each.data)
            counts = {"flat_tokens": float(sum(len(datum.tokens) for datum in each.data)), "encoded_tokens": first_encoded}
            job.counter.add(**counts)
            operation.result = output_of(logprobs[begin:end], {
                "loss:sum": losses[number], **{f"espalier/{name}:sum": count for name, count in counts.items()}})  # fmt: skip
            begin, number, first_encoded = end, number + 1, 0.0


def _remember_passes(job: _Job, forests: list[list[Passes]] | None) -> None:
    """Keeps what made the gradients of a model, unless its worker has too much of that. forests: those before."""
    weights, made = job.model.weights, [*(forests or ()), job.passes]
    weights.passes = None
    kept = [made, *(each.passes or () for each in job.model.worker.trained())]
    if forests is not None and sum(each.nbytes for forests in kept for passes in forests for each in passes) <= PASSES_BYTES:
        weights.passes = made


def _losses(rows: Rows, passes: list[Passes], logprobs: list[Any]) -> list[Any]:
    import torch

    found = rows.per_datum(logprobs, lambda columns: torch.stack(columns, dim=1))
    values, begin = [], 0
    for each in passes:
        values.append(each.loss.value(found[begin : begin + len(each.data)]))
        begin += len(each.data)
    return values


def _forward_backward(jobs: list[_Job], rows: Rows, passes: list[Passes]) -> Any:
    seen: dict[str, Any] = {}

    def loss(logprobs: list[Any], positions: list[Any]) -> Any:
        values = _losses(rows, passes, logprobs)
        seen["losses"] = [value.item() for value in values]
        seen["logprobs"] = [values.detach().numpy() for values in logprobs]
        return sum(values)

    adapters = [job.model.weights.adapter for job in jobs for datum in job.data for _ in range(datum.width)]
    metrics = jobs[0].model.worker.engine.forward_backward(rows.rows, loss, adapters=adapters if len(jobs) > 1 else None)
    return (rows.per_datum(seen["logprobs"], lambda columns: np.stack(columns, 1)), seen["losses"],
            metrics["encoded_tokens"])  # fmt: skip


def _forward(jobs: list[_Job], rows: Rows, passes: list[Passes]) -> Any:
    import torch

    values = [np.asarray(row[1:], np.float64) for row in jobs[0].model.worker.engine.logprobs(rows.rows)]
    losses = [float(value) for value in _losses(rows, passes, [torch.from_numpy(row) for row in values])]
    return rows.per_datum(values, lambda columns: np.stack(columns, 1)), losses, _tree_tokens(rows)


def _tree_tokens(rows: Rows) -> int:
    return int(core.build_forest(rows.rows.offsets, rows.rows.input_ids).tree_tokens)


def optim_step(adam: Adam) -> Work:
    """The work of an optimiser step."""

    def work(model: Model) -> dict[str, Any]:
        model.worker.use(model.weights)
        done = model.worker.engine.optim_step(
            adam.learning_rate, beta1=adam.beta1, beta2=adam.beta2, eps=adam.eps, weight_decay=adam.weight_decay,
            max_grad_norm=adam.grad_clip_norm)  # fmt: skip
        model.weights.has_gradients, model.weights.passes = False, []
        return {"metrics": {name: float(value) for name, value in done.items()}}

    return work
