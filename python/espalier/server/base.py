# SPDX-License-Identifier: Apache-2.0
"""A model that is served: one engine, the adapters on it, and the thread that does its work in turn."""

import asyncio
import collections
import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import safetensors

import espalier

from ..errors import InputError
from .futures import Failure, failure_of
from .store import Store

logger = logging.getLogger("uvicorn.error")
LORA_ALPHA = 32.0  # as the hosted service scales adapters: by 32 over the rank


@dataclass(frozen=True)
class LoraSettings:
    """What `create_model` says of an adapter."""

    rank: int
    seed: int
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


@dataclass(eq=False)
class Adapter:
    """An adapter of one client, or a snapshot of one. `handle` is None while it lies on disk."""

    handle: Any
    lora: LoraSettings
    folder: Path | None = None   # of a file that is true, or to be read
    is_snapshot: bool = False    # never trained, so its file stays true
    has_gradients: bool = False  # which a file does not keep


class Job(Protocol):
    """Work for a thread of a base."""

    def run(self) -> None:
        """On the thread of the base."""

    def finish(self) -> None:
        """Afterwards, on the thread of the event loop."""

    def fail(self, failure: Failure) -> None:
        """In place of `finish`, where `run` or `finish` raised an error."""


class Source(Protocol):
    """What may have work for a base: a model in training, or its samplers."""

    @property
    def has_begun(self) -> bool:
        """Whether jobs are left of what has begun, for which a base that stops waits."""

    def next_job(self) -> Job | None:
        """The next one, if it is ready."""


def linear_groups(names: list[str]) -> dict[str, list[str]]:
    """Names of linear maps by what the API calls them: attn (whatever mixes tokens), mlp and unembed.

    Args:
        names: Of modules with the path to them, such as model.layers.0.self_attn.q_proj.
    """
    groups: dict[str, set[str]] = {"attn": set(), "mlp": set(), "unembed": set()}
    for path in names:
        *above, name = path.split(".")
        is_mlp = any(part in ("mlp", "feed_forward", "block_sparse_moe", "experts", "shared_expert", "shared_mlp", "ffn")
                     for part in above)  # fmt: skip
        groups["unembed" if name == "lm_head" else "mlp" if is_mlp else "attn"].add(name)
    return {group: sorted(found) for group, found in groups.items()}


class Base:
    """One model, in one precision on one device.

    Args:
        name: By which clients ask for it.
        folder: A Hugging Face folder.
        options: Of espalier.Engine.
        store: Where adapters lie that are in no use.
        max_adapters: How many are kept in memory at a time.

    Raises:
        InputError: The model or an option cannot be used.
    """

    def __init__(self, name: str, folder: str | os.PathLike[str], options: Mapping[str, Any], store: Store,
                 max_adapters: int) -> None:  # fmt: skip
        self.name = name
        self.folder = Path(folder).absolute()
        self.engine = espalier.Engine(self.folder, adapters=True, **options)
        config = _json(self.folder / "config.json")
        text = config.get("text_config") or config
        self.vocab_size = int(text["vocab_size"])
        self.max_context = int(text.get("max_position_embeddings") or 1 << 20)
        ends = _json(self.folder / "generation_config.json").get("eos_token_id", text.get("eos_token_id"))
        self.stop_ids = [ends] if isinstance(ends, int) else list(ends or [])
        self.groups = self._groups()
        self._store = store
        self._max_adapters = max_adapters
        self._resident: collections.OrderedDict[int, Adapter] = collections.OrderedDict()  # the last used one last
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"espalier-{name}")
        self._sources: collections.deque[Source] = collections.deque()
        self._wake = asyncio.Event()
        self.is_stopped = False  # no more requests begin
        self._work: asyncio.Task[None] | None = None

    # On the thread of the base.

    def new_adapter(self, lora: LoraSettings) -> Adapter:
        """A new adapter, with B of zeros. Raises InputError."""
        chosen = [name for group, names in self.groups.items() if getattr(lora, f"train_{group}") for name in names]
        if not chosen:
            known = ", ".join(name for names in self.groups.values() for name in names)
            raise InputError(f"lora_config: expected train_mlp, train_attn or train_unembed to choose of {known}, received none")
        handle = self.engine.new_adapter(lora_rank=lora.rank, lora_alpha=LORA_ALPHA, lora_targets=chosen, seed=lora.seed)
        adapter = Adapter(handle, lora)
        self._keep(adapter)
        return adapter

    def snapshot(self, adapter: Adapter) -> Adapter:
        """The weights as they are now, for sampling."""
        self.use(adapter)
        copy = Adapter(adapter.handle.copy(), adapter.lora, is_snapshot=True)
        self._keep(copy)
        return copy

    def load(self, folder: Path, lora: LoraSettings, *, optimizer: bool, is_snapshot: bool = False) -> Adapter:
        """The adapter of a checkpoint. Raises InputError."""
        adapter = Adapter(self._opened(folder, optimizer=optimizer), lora, is_snapshot=is_snapshot)
        self._keep(adapter)
        return adapter

    def _opened(self, folder: Path, *, optimizer: bool) -> espalier.Adapter:
        handle = self.engine.new_adapter(adapter=folder)
        if optimizer:
            self.engine.use(handle)
            self.engine.load(folder)
        return handle

    def _groups(self) -> dict[str, list[str]]:
        """Of the maps that can have an adapter, which one with all of them names in its file."""
        with tempfile.TemporaryDirectory() as place:
            self.engine.use(self.engine.new_adapter(lora_rank=1, lora_targets=["all-linear", "lm_head"]))
            self.engine.save(Path(place) / "adapter")
            self.engine.use(None)
            with safetensors.safe_open(Path(place) / "adapter/adapter_model.safetensors", "numpy") as file:
                paths = {key.rpartition(".lora_")[0] for key in file.keys()}  # noqa: SIM118
        return linear_groups(sorted(paths))

    def use(self, adapter: Adapter | None) -> None:
        """Makes an adapter, or none, the one that the engine works with; reads it from disk if it lies there."""
        if adapter is None:
            self.engine.use(None)
            return
        if adapter.handle is None:
            if adapter.folder is None:
                raise InputError("expected an adapter that still exists, received one that was unloaded or whose session ended")
            adapter.handle = self._opened(adapter.folder, optimizer=not adapter.is_snapshot)
            if not adapter.is_snapshot:
                _forget_file(adapter)
        self._keep(adapter)
        self.engine.use(adapter.handle)

    def drop(self, adapter: Adapter) -> None:
        """Forgets an adapter."""
        self._resident.pop(id(adapter), None)
        self.engine.use(None)
        adapter.handle = None
        _forget_file(adapter)

    def _keep(self, adapter: Adapter) -> None:
        self._resident[id(adapter)] = adapter
        self._resident.move_to_end(id(adapter))
        for key, other in list(self._resident.items()):
            if len(self._resident) <= self._max_adapters:
                return
            if other is not adapter and not other.has_gradients and self._park(other):
                del self._resident[key]

    def _park(self, adapter: Adapter) -> bool:
        """Whether it lies on disk now. Where it cannot (the disk is full, or it has nan), only memory is lost, not the request
        of another client."""
        if adapter.folder is None:
            folder = self._store.parked()
            try:
                self.engine.use(adapter.handle)
                self.engine.save(folder)
            except Exception as error:
                logger.warning("%s: an adapter stays in memory, it cannot be written: %s", self.name, error)
                shutil.rmtree(folder, ignore_errors=True)
                return False
            adapter.folder = folder
        adapter.handle = None
        return True

    # On the thread of the event loop.

    def add(self, source: Source) -> None:
        """From now on its jobs are done, in turn with those of the others."""
        self._sources.append(source)

    def remove(self, source: Source) -> None:
        self._sources.remove(source)

    def wake(self) -> None:
        """A source may have work."""
        self._wake.set()

    def start(self) -> None:
        self._work = asyncio.get_running_loop().create_task(self._run())

    async def do(self, work: Callable[[], Any]) -> Any:
        """Work between jobs."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def stop(self) -> None:
        """After what has begun. May be called twice."""
        self.is_stopped = True
        self._wake.set()
        if self._work is not None:
            await self._work
        self._thread.shutdown()

    def _next_job(self) -> Job | None:
        for _ in range(len(self._sources)):
            source = self._sources[0]
            self._sources.rotate(-1)
            if (source.has_begun or not self.is_stopped) and (job := source.next_job()) is not None:
                return job
        return None

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            job = self._next_job()
            if job is None and self.is_stopped:
                return
            if job is None:
                await self._wake.wait()
                continue
            try:
                await self.do(job.run)
                job.finish()
            except Exception as error:
                failure = failure_of(error)
                if failure.category == "server":
                    logger.exception("%s: a request failed", self.name)
                job.fail(failure)


def _forget_file(adapter: Adapter) -> None:
    if adapter.folder is not None:
        shutil.rmtree(adapter.folder, ignore_errors=True)
        adapter.folder = None


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


class Counter:
    """Tokens of training and sampling since the server started. Used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()

    def add(self, **counts: float) -> None:
        with self._lock:
            self._counts.update(counts)

    def counts(self) -> dict[str, float]:
        with self._lock:
            return dict(self._counts)
