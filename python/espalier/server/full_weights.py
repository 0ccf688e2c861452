# SPDX-License-Identifier: Apache-2.0
"""Whole weights of clients: each model in training has its own engine, and all snapshots of a model share another.

Snapshots lie on disk; the one that is sampled is in memory. So a served model takes, for each model in training, weights,
gradients and optimiser, and for all samplers together the weights once.
"""

import contextlib
from pathlib import Path

from ..engine import Engine
from ..errors import InputError
from .base import Base
from .store import CheckpointPath, Store, drop_optimizer
from .worker import LoraSettings, TrainingWorker, Weights, Worker


class Snapshots(Worker):
    """Samples snapshots of whole weights of a model."""

    holds_one = True

    def __init__(self, base: Base) -> None:
        super().__init__(base.name, base.folder, base.options, base.store)
        self._loaded: Weights | None = None

    def use(self, weights: Weights | None) -> None:
        if weights is None or weights.folder is None:
            raise InputError("expected weights that still exist, received those of a sampler that is no more")
        if weights is not self._loaded:
            self._unload()  # first, so that memory has one of them at a time
            self.engine = Engine(weights.folder, adapters=True, **self.options)
            self._loaded = weights

    def drop(self, weights: Weights) -> None:
        """On any thread."""
        self._thread.submit(self._drop, weights)

    def _drop(self, weights: Weights) -> None:
        if weights is self._loaded:
            self._unload()
        weights.forget_folder()

    def _unload(self) -> None:
        self._loaded = None
        with contextlib.suppress(AttributeError):
            del self.engine

    def load(self, store: Store, path: CheckpointPath, lora: LoraSettings) -> Weights:
        """The weights of a checkpoint, which may be deleted afterwards. On any thread. Raises Refused."""
        return Weights(self, lora, folder=store.second_folder(path), is_snapshot=True)


class FullWeights(TrainingWorker):
    """Trains the weights of one model. It begins with those of the base, or of a checkpoint, and with its optimiser where that is
    wanted. Raises InputError where the checkpoint cannot be used."""

    def __init__(self, base: Base, lora: LoraSettings, snapshots: Snapshots, checkpoint: Path | None = None, *,
                 optimizer: bool = False) -> None:  # fmt: skip
        super().__init__(base.name, base.folder, base.options, base.store)
        self._base = base
        self._snapshots = snapshots
        self.engine = Engine(base.folder, **base.options)
        if checkpoint is not None:
            self.engine.load(checkpoint, optimizer=optimizer)
        self.weights = Weights(self, lora)

    @property
    def served(self) -> TrainingWorker:
        return self._base

    def use(self, weights: Weights | None) -> None:
        pass  # the engine has no others

    def drop(self, weights: Weights) -> None:
        del self.engine

    def trained(self) -> list[Weights]:
        return [self.weights]

    def write(self, weights: Weights, folder: Path) -> None:
        self.save(weights, folder, optimizer=True)

    def snapshot(self, weights: Weights) -> Weights:
        folder = self.store.parked()
        self.save(weights, folder, optimizer=False)
        return Weights(self._snapshots, weights.lora, folder=folder, is_snapshot=True)

    def save(self, weights: Weights, folder: Path, *, optimizer: bool) -> None:
        self.engine.save(folder)
        if not optimizer:
            drop_optimizer(folder)

    def replaced(self, before: Weights, folder: Path, *, optimizer: bool) -> Weights:
        self.engine.load(folder, optimizer=optimizer)
        before.has_gradients, before.passes = False, []
        return before
