# SPDX-License-Identifier: Apache-2.0
"""What works for clients: a thread with an engine. Its sources have jobs, which it does in turn."""

import asyncio
import collections
import json
import logging
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..engine import Engine
from ..errors import InputError
from . import disk
from .futures import Failure, failure_of
from .store import Store

logger = logging.getLogger("uvicorn.error")


@dataclass(frozen=True)
class LoraSettings:
    """What `create_model` says of an adapter. Rank 0: there is none, the weights themselves are trained."""

    rank: int
    seed: int
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


@dataclass(eq=False)
class Weights:
    """What one client trains, or a snapshot of it: an adapter, or whole weights."""

    worker: "Worker"             # whose engine works with them
    lora: LoraSettings
    adapter: Any = None          # None: on disk, or whole weights
    folder: Path | None = None   # of a file that is true, or to be read
    is_snapshot: bool = False    # never trained, so its file stays true
    has_gradients: bool = False  # which a file does not keep
    passes: list[list[Any]] | None = field(default_factory=list)  # training.Passes that made them, by forest; None: too many
    lacks_gradients: bool = False  # after a planned restart, until those passes are repeated
    park_after: float = 0.0      # a time; 0: it could always be written

    def forget_folder(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None


class Job(Protocol):
    """Work for a worker."""

    def run(self) -> None:
        """On the thread of the worker."""

    def finish(self) -> None:
        """Afterwards, on the thread of the event loop."""

    def fail(self, failure: Failure) -> None:
        """In place of `finish`, where `run` or `finish` raised an error."""


class Source(Protocol):
    """What may have work for a worker: a model in training, or samplers."""

    @property
    def clients(self) -> int:
        """For how many clients its jobs are: it has as many shares of the time."""

    @property
    def has_begun(self) -> bool:
        """Whether jobs are left of what has begun, for which a worker that stops waits."""

    def next_job(self) -> Job | None:
        """The next one, if it is ready."""


class Worker(ABC):
    """The thread of one engine, for a model that clients ask for by name. options: of espalier.Engine; store: where weights lie
    that are in no use."""

    engine: Engine
    holds_one = False      # the engine has the weights of one snapshot, so that others are not sampled beside it
    joins_clients = False  # passes of several models in training are one

    def __init__(self, name: str, folder: Path, options: Mapping[str, Any], store: Store) -> None:
        self.name = name
        self.folder = folder
        self.options = options
        self.store = store
        config = _json(folder / "config.json")
        text = config.get("text_config") or config
        self.vocab_size = int(text["vocab_size"])
        self.max_context = int(text.get("max_position_embeddings") or 1 << 20)
        ends = _json(folder / "generation_config.json").get("eos_token_id", text.get("eos_token_id"))
        self.stop_ids = [ends] if isinstance(ends, int) else list(ends or [])
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"espalier-{name}")
        self.sources: collections.deque[Source] = collections.deque()
        self._used: dict[Source, float] = {}  # seconds for each of its clients
        self._now = 0.0  # of the source whose job runs, or ran last
        self._wake = asyncio.Event()
        self.is_stopped = False  # no more requests begin
        self._work: asyncio.Task[None] | None = None

    # On its thread.

    @abstractmethod
    def use(self, weights: Weights | None) -> None:
        """Makes them what the engine works with; reads them from disk if they lie there. None: those of the model. Raises
        InputError where they are no more."""

    @abstractmethod
    def drop(self, weights: Weights) -> None:
        """Forgets them."""

    def write(self, weights: Weights, folder: Path) -> None:
        """Writes them as they lie on disk while they are in no use, with the optimiser's state of those that are trained. Raises
        InputError where they cannot be written, OSError."""
        if weights.folder is None:
            raise InputError("expected weights that still exist, received those of a sampler that is no more")
        disk.link_tree(weights.folder, folder)

    # On the thread of the event loop.

    def add(self, source: Source) -> None:
        """From now on its jobs are done, in turn with those of the others."""
        self.sources.append(source)

    def remove(self, source: Source) -> None:
        self.sources.remove(source)
        self._used.pop(source, None)

    def wake(self) -> None:
        """A source may have work."""
        self._wake.set()

    def start(self) -> None:
        self._work = asyncio.get_running_loop().create_task(self._run())

    async def do(self, work: Callable[[], Any]) -> Any:
        """Work between jobs."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def do_later(self, work: Callable[[], Any]) -> None:
        """Work after the job that runs. On any thread."""
        self._thread.submit(work)

    async def stop(self) -> None:
        """After what has begun. May be called twice."""
        self.is_stopped = True
        self._wake.set()
        if self._work is not None:
            await self._work
        self._thread.shutdown()

    def _next_job(self) -> tuple[Source, Job] | None:
        """Of the source that had the least time (start-time fair queueing: Goyal, Vin and Cheng, 1996). One that was idle has
        no claim to the time that it did not use."""
        for source in sorted(self.sources, key=self._begin):
            if (source.has_begun or not self.is_stopped) and (job := source.next_job()) is not None:
                self._now = self._used[source] = self._begin(source)
                self.sources.remove(source)  # the last one of those that had as much
                self.sources.append(source)
                return source, job
        return None

    def _begin(self, source: Source) -> float:
        return max(self._now, self._used.get(source, 0.0))

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            found = self._next_job()
            if found is None and self.is_stopped:
                return
            if found is None:
                await self._wake.wait()
                continue
            source, job = found
            begun, clients = time.monotonic(), source.clients
            try:
                await self.do(job.run)
                job.finish()
            except Exception as error:
                job.fail(self.failure_of(error))
            if source in self._used:
                self._used[source] += (time.monotonic() - begun) / clients

    def failure_of(self, error: Exception) -> Failure:
        """What clients are told of an exception that is handled. Those that are not theirs are logged."""
        failure = failure_of(error)
        if failure.category == "server":
            logger.error("%s: a request failed", self.name, exc_info=error)
        return failure


class TrainingWorker(Worker):
    """A worker whose engine trains weights of clients, too. All methods are for its thread."""

    @property
    def served(self) -> "TrainingWorker":
        """That of the model of which the weights are."""
        return self

    @abstractmethod
    def snapshot(self, weights: Weights) -> Weights:
        """The weights as they are now, for sampling."""

    @abstractmethod
    def save(self, weights: Weights, folder: Path, *, optimizer: bool) -> None:
        """Writes a checkpoint, with the optimiser's state or without. Raises InputError."""

    @abstractmethod
    def replaced(self, before: Weights, folder: Path, *, optimizer: bool) -> Weights:
        """The weights of a checkpoint, which take the place of others. Raises InputError, and then those stay."""

    @abstractmethod
    def trained(self) -> Iterable[Weights]:
        """Those in memory."""


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
