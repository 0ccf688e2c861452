# SPDX-License-Identifier: Apache-2.0
"""A model that is served, and the adapters on it."""

import collections
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors

from ..adapter import Adapter
from ..engine import Engine
from ..errors import InputError
from .fingerprint import fingerprint
from .store import Store, check_files
from .worker import LoraSettings, TrainingWorker, Weights

logger = logging.getLogger("uvicorn.error")
PARK_AGAIN_SECONDS = 60.0  # after an adapter could not be written
MAX_UNWRITTEN = 64         # adapters that stay in memory as they cannot be written
LORA_ALPHA = 32.0  # as the hosted service scales adapters: by 32 over the rank


def linear_groups(names: list[str]) -> dict[str, list[str]]:
    """Names of linear maps by what the API calls them: attn (whatever mixes tokens), mlp and unembed. names: with the path to
    each, such as model.layers.0.self_attn.q_proj."""
    groups: dict[str, set[str]] = {"attn": set(), "mlp": set(), "unembed": set()}
    for path in names:
        *above, name = path.split(".")
        is_mlp = any(part in ("mlp", "feed_forward", "block_sparse_moe", "experts", "shared_expert", "shared_mlp", "ffn")
                     for part in above)  # fmt: skip
        groups["unembed" if name == "lm_head" else "mlp" if is_mlp else "attn"].add(name)
    return {group: sorted(found) for group, found in groups.items()}


class Base(TrainingWorker):
    """One model, in one precision on one device, and the adapters on it, of which `max_adapters` are kept in memory at a time.
    joins_clients: passes of several in training that are ready at the same time are one. Raises InputError where the model or an
    option cannot be used."""

    def __init__(self, name: str, folder: str | os.PathLike[str], options: Mapping[str, Any], store: Store,
                 max_adapters: int, *, joins_clients: bool = False) -> None:  # fmt: skip
        super().__init__(name, Path(folder).absolute(), options, store)
        self.engine = Engine(self.folder, adapters=True, **options)
        self.fingerprint = fingerprint(self.folder, str(options.get("dtype")))  # now, as files may be replaced later
        self.joins_clients = joins_clients
        self.groups = self._groups()
        self._max_adapters = max_adapters
        self._resident: collections.OrderedDict[int, Weights] = collections.OrderedDict()  # the last used one last

    # On the thread of the base.

    def new_weights(self, lora: LoraSettings) -> Weights:
        """A new adapter, with B of zeros. Raises InputError."""
        self._check_room()
        chosen = [name for group, names in self.groups.items() if getattr(lora, f"train_{group}") for name in names]
        if not chosen:
            known = ", ".join(name for names in self.groups.values() for name in names)
            raise InputError(f"lora_config: expected train_mlp, train_attn or train_unembed to choose of {known}, received none")
        adapter = self.engine.new_adapter(lora_rank=lora.rank, lora_alpha=LORA_ALPHA, lora_targets=chosen, seed=lora.seed)
        return self._kept(Weights(self, lora, adapter))

    def zeros(self) -> Weights:
        """An adapter that changes nothing, for sampling."""
        target = next(name for names in self.groups.values() for name in names)
        adapter = self.engine.new_adapter(lora_rank=1, lora_alpha=LORA_ALPHA, lora_targets=[target], seed=0)
        return self._kept(Weights(self, LoraSettings(1, 0), adapter, is_snapshot=True))

    def load(self, folder: Path, lora: LoraSettings, *, optimizer: bool, is_snapshot: bool = False) -> Weights:
        """The adapter of a checkpoint. Raises InputError."""
        self._check_room()
        return self._kept(Weights(self, lora, self._opened(folder, optimizer=optimizer), is_snapshot=is_snapshot))

    def replaced(self, before: Weights, folder: Path, *, optimizer: bool) -> Weights:
        weights = self.load(folder, before.lora, optimizer=optimizer)
        self.drop(before)
        return weights

    def snapshot(self, weights: Weights) -> Weights:
        self._check_room()
        self.use(weights)
        return self._kept(Weights(self, weights.lora, weights.adapter.copy(), is_snapshot=True))

    def save(self, weights: Weights, folder: Path, *, optimizer: bool) -> None:
        self.use(weights)
        if not optimizer:
            assert weights.adapter is not None
            self.engine.use(weights.adapter.copy())  # copies have none
        self.engine.save(folder)

    def _opened(self, folder: Path, *, optimizer: bool) -> Adapter:
        adapter = self.engine.new_adapter(adapter=folder)
        if optimizer:
            self.engine.use(adapter)
            self.engine.load(folder)  # looks at the checksums again
        return adapter

    def _groups(self) -> dict[str, list[str]]:
        """Of the maps that can have an adapter, which one with all of them names in its file."""
        with tempfile.TemporaryDirectory() as place:
            self.engine.use(self.engine.new_adapter(lora_rank=1, lora_targets=["all-linear", "lm_head"]))
            self.engine.save(Path(place) / "adapter")
            self.engine.use(None)
            with safetensors.safe_open(Path(place) / "adapter/adapter_model.safetensors", "numpy") as file:
                paths = {key.rpartition(".lora_")[0] for key in file.keys()}  # noqa: SIM118
        return linear_groups(sorted(paths))

    def use(self, weights: Weights | None) -> None:
        if weights is None:
            self.engine.use(None)
            return
        if weights.adapter is None:
            if weights.folder is None:
                raise InputError("expected an adapter that still exists, received one that was unloaded or whose session ended")
            check_files(weights.folder, self.name)
            weights.adapter = self._opened(weights.folder, optimizer=not weights.is_snapshot)
            if not weights.is_snapshot:
                weights.forget_folder()
        self.engine.use(self._kept(weights).adapter)

    def trained(self) -> list[Weights]:
        return list(self._resident.values())

    def write(self, weights: Weights, folder: Path) -> None:
        if weights.folder is not None:
            super().write(weights, folder)
            return
        if weights.adapter is None:
            raise InputError("expected an adapter that still exists, received one that was unloaded or whose session ended")
        self.engine.use(weights.adapter)
        self.engine.save(folder)

    def drop(self, weights: Weights) -> None:
        self._resident.pop(id(weights), None)
        self.engine.use(None)
        weights.adapter = None
        weights.forget_folder()

    def _check_room(self) -> None:
        """Raises InputError where memory has too many adapters that cannot be written."""
        if sum(weights.park_after > 0 for weights in self._resident.values()) >= MAX_UNWRITTEN:
            raise InputError(f"{MAX_UNWRITTEN} adapters stay in memory because they cannot be written to --state: it is full, or "
                             "their weights are not finite; unload some")  # fmt: skip

    def _kept(self, weights: Weights) -> Weights:
        """As used last. Others go to disk where too many are in memory."""
        self._resident[id(weights)] = weights
        self._resident.move_to_end(id(weights))
        for key, other in list(self._resident.items()):
            if len(self._resident) <= self._max_adapters:
                break
            if time.monotonic() < other.park_after:
                continue
            if other is not weights and not other.has_gradients and self._park(other):
                del self._resident[key]
        return weights

    def _park(self, weights: Weights) -> bool:
        """Whether it lies on disk now. Where it cannot (the disk is full, or it has nan), only memory is lost, not the request
        of another client."""
        if weights.folder is None:
            folder = self.store.parked()
            try:
                self.write(weights, folder)
            except Exception as error:
                if weights.park_after == 0:
                    logger.warning("%s: an adapter stays in memory, it cannot be written: %s", self.name, error)
                weights.park_after = time.monotonic() + PARK_AGAIN_SECONDS
                shutil.rmtree(folder, ignore_errors=True)
                return False
            weights.folder, weights.park_after = folder, 0.0
        weights.adapter = None
        return True


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
