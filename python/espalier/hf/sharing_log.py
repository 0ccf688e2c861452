# SPDX-License-Identifier: Apache-2.0
"""How much a training run shares: metrics for the log of a trainer or of a loop, and a warning where it shares nothing."""

import warnings
from typing import Any

import numpy as np
from transformers import TrainerCallback

from ..errors import Unsupported
from ..trees import Layout, build
from .checked_patch import patch
from .families import backbone_of
from .patching import Patch, patch_of
from .rows import Rows

WATCHED_BATCHES = 16  # of which rows are kept, until it is known whether they share
LITTLE = 1.05  # a ratio below is next to nothing


class SharingMeter:
    """Counts what a patched model shares in the batches that it is trained on, those with gradients.

    For a loop of one's own, with accelerate or without:

        meter = espalier.hf.SharingMeter(model)
        for step, batch in enumerate(loader):
            loss = model(**batch).loss
            accelerator.backward(loss)
            ...
            accelerator.log({"loss": loss.item(), **meter.metrics()}, step=step)

    After 16 batches that share next to nothing (a ratio below 1.05) it warns once and says why. Figures are those of this
    process. Raises Unsupported for a model that is not patched. A model has one meter; another takes its place.

    num_generations  of a trainer that samples: generations for each prompt. It only changes the advice of the warning."""

    def __init__(self, model: Any, *, num_generations: int | None = None) -> None:
        given = patch_of(backbone_of(model))
        if given is None:
            raise Unsupported("SharingMeter: expected a patched model, received one that is not; call "
                              "espalier.hf.patch(model) first")  # fmt: skip
        self._num_generations = num_generations
        self._flat = self._tree = 0  # tokens since metrics() was called
        self._watched: list[Rows] | None = []  # of the first batches; None when they have been judged
        self._watched_tree = 0
        self.patch: Patch = given
        given.meter = self

    def count(self, rows: Rows, layout: Layout) -> None:
        """What the patched model calls for each batch that is trained on."""
        self._flat += len(rows.tokens)
        self._tree += layout.num_tokens
        if self._watched is not None:
            self._watched.append(rows)
            self._watched_tree += layout.num_tokens
            if len(self._watched) == WATCHED_BATCHES:
                self.judge()

    def metrics(self) -> dict[str, float]:
        """Of the batches since the last call: "espalier/tokens", those of the rows without padding;
        "espalier/encoded_tokens"; "espalier/ratio", the first over the second. Empty where there was no batch."""
        flat, tree = self._flat, self._tree
        self._flat = self._tree = 0
        if tree == 0:
            return {}
        return {"espalier/tokens": flat, "espalier/encoded_tokens": tree, "espalier/ratio": flat / tree}

    def judge(self) -> None:
        """Warns if the batches so far share next to nothing. Nothing is judged a second time."""
        watched, self._watched = self._watched, None
        if not watched:
            return
        flat = sum(len(rows.tokens) for rows in watched)
        if flat / self._watched_tree >= LITTLE:
            return
        together = flat / build(_joined(watched)).tree_tokens
        warnings.warn(f"espalier: {flat:,} tokens of {len(watched)} micro-batches, {self._watched_tree:,} encoded: trees save "
                      f"next to nothing. {self._reason(together)}", stacklevel=2)  # fmt: skip

    def close(self) -> None:
        """Judges what is not judged yet, and stops counting."""
        self.judge()
        if self.patch.meter is self:
            self.patch.meter = None

    def _reason(self, together: float) -> str:
        if together < LITTLE:
            return "The rows have no prefixes in common, within a micro-batch or across micro-batches."
        lost = f"in one batch the same rows would share {together:.2f}x"
        if self._num_generations:
            return (f"The generations of a prompt are in different micro-batches: {lost}. Leave keep_groups=True in "
                    "espalier.trl.patch, and make per_device_train_batch_size a multiple of num_generations="
                    f"{self._num_generations}.")  # fmt: skip
        return (f"It is the order of the rows: those with a common prefix are in different micro-batches; {lost}. Take "
                "espalier.hf.group_sampler, or larger micro-batches.")  # fmt: skip


def _joined(batches: list[Rows]) -> tuple[Any, Any]:
    """The rows of all as (offsets, tokens)."""
    sizes = np.concatenate([np.diff(rows.offsets) for rows in batches])
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), np.concatenate([rows.tokens for rows in batches])


class SharingCallback(TrainerCallback):
    """Puts the metrics of a SharingMeter into each line that a Trainer logs about training, TRL's among them, and warns
    where nothing is shared.

    trainer = Trainer(..., callbacks=[SharingCallback()]) brings them into `trainer.state.log_history` and what is printed.
    Reporters, such as those of TensorBoard and Weights & Biases, are called before the callbacks of the user: `log_sharing`
    adds the callback in front of them, and `espalier.trl.patch` calls that.

    verify  verify the first batch, patched against unpatched, as `espalier.hf.patch(model, check=True)` does"""

    def __init__(self, *, verify: bool = False) -> None:
        self.verify = verify
        self.meter: SharingMeter | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Begins to count, and asks for the first batch to be verified where that is wanted."""
        self.meter = SharingMeter(model, num_generations=getattr(args, "num_generations", None))
        if self.verify:
            patch(model, backend=self.meter.patch.backend, check=True)
            self.verify = False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Adds the metrics to a line about training."""
        if logs is None or "loss" not in logs or self.meter is None:
            return
        metrics = self.meter.metrics()
        logs.update(metrics)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends counting. Warns if fewer micro-batches than are watched have shared next to nothing."""
        if self.meter is not None:
            self.meter.close()
            self.meter = None


def log_sharing(trainer: Any, *, verify: bool = False) -> SharingCallback:
    """Adds a SharingCallback to a Trainer, in front of its reporters, or moves the one there to the front; returns it.

    verify  as SharingCallback has it"""
    callbacks = trainer.callback_handler.callbacks
    given = next((each for each in callbacks if isinstance(each, SharingCallback)), None)
    if given is None:
        given = SharingCallback(verify=verify)
    else:
        callbacks.remove(given)
        given.verify = given.verify or verify
    callbacks.insert(0, given)
    return given
