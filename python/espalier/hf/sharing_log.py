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

    For your own training loop, with accelerate or without: add `meter.metrics()` to what the loop logs. After 16 batches
    that share next to nothing (a ratio below 1.05) it warns once and gives the reason. Figures are those of this process. A
    model has one meter; a new one replaces it.

    Args:
        model: A patched model.
        num_generations: For trainers that sample: generations per prompt. It only changes the advice of the warning.

    Raises:
        Unsupported: The model is not patched.

    Examples:
        >>> model = espalier.hf.patch(model)
        >>> meter = espalier.hf.SharingMeter(model)
        >>> model(input_ids=batch, labels=batch).loss.backward()
        >>> sorted(meter.metrics())
        ['espalier/encoded_tokens', 'espalier/ratio', 'espalier/tokens']
    """

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
        """Counts a batch. The patched model calls this for each batch that it is trained on.

        Args:
            rows: The rows of the batch.
            layout: The tree of the batch.

        Examples:
            >>> meter.count(rows, layout)  # doctest: +SKIP
        """
        self._flat += len(rows.tokens)
        self._tree += layout.num_tokens
        if self._watched is not None:
            self._watched.append(rows)
            self._watched_tree += layout.num_tokens
            if len(self._watched) == WATCHED_BATCHES:
                self.judge()

    def metrics(self) -> dict[str, float]:
        """Metrics of the batches since the last call.

        Returns:
            "espalier/tokens", the tokens of the rows without padding; "espalier/encoded_tokens"; "espalier/ratio", the first
            over the second. Empty if there was no batch.

        Examples:
            >>> espalier.hf.SharingMeter(espalier.hf.patch(model)).metrics()
            {}
        """
        flat, tree = self._flat, self._tree
        self._flat = self._tree = 0
        if tree == 0:
            return {}
        return {"espalier/tokens": flat, "espalier/encoded_tokens": tree, "espalier/ratio": flat / tree}

    def judge(self) -> None:
        """Warns if the batches so far share next to nothing. Later calls do nothing.

        Examples:
            >>> espalier.hf.SharingMeter(espalier.hf.patch(model)).judge()
        """
        watched, self._watched = self._watched, None
        if not watched:
            return
        flat = sum(len(rows.tokens) for rows in watched)
        if flat / self._watched_tree >= LITTLE:
            return
        sizes = np.concatenate([np.diff(rows.offsets) for rows in watched])
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        together = flat / build((offsets, np.concatenate([rows.tokens for rows in watched]))).tree_tokens
        warnings.warn(f"espalier: {flat:,} tokens of {len(watched)} micro-batches, {self._watched_tree:,} encoded: trees save "
                      f"next to nothing. {self._reason(together)}", stacklevel=2)  # fmt: skip

    def close(self) -> None:
        """Judges the batches that are not judged yet, and stops counting.

        Examples:
            >>> espalier.hf.SharingMeter(espalier.hf.patch(model)).close()
        """
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


class SharingCallback(TrainerCallback):
    """Adds the metrics of a SharingMeter to each line that a Trainer logs about training, and warns if nothing is shared.

    `Trainer(..., callbacks=[SharingCallback()])` adds them to `trainer.state.log_history` and to the printed lines, for
    trainers of TRL as well. Reporters, such as those of TensorBoard and Weights & Biases, are called before the callbacks of
    the user: `log_sharing` adds the callback before them, and `espalier.trl.patch` calls `log_sharing`.

    Args:
        verify: Verify the first batch, patched against unpatched, as `espalier.hf.patch(model, check=True)` does.

    Examples:
        >>> callback = espalier.hf.SharingCallback(verify=True)
    """

    def __init__(self, *, verify: bool = False) -> None:
        self.verify = verify
        self.meter: SharingMeter | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Starts counting. Part of the interface of TrainerCallback.

        Args:
            args: The trainer's arguments.
            state: Its state.
            control: Its control.
            model: The model that is trained.

        Examples:
            >>> callback.on_train_begin(args, state, control, model=model)  # doctest: +SKIP
        """
        self.meter = SharingMeter(model, num_generations=getattr(args, "num_generations", None))
        if self.verify:
            given = self.meter.patch
            patch(model, backend=given.backend, check=True, skip_logits=given.skip_logits, dropout=given.dropout)
            self.verify = False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Adds the metrics to a line about training. Part of the interface of TrainerCallback.

        Args:
            args: The trainer's arguments.
            state: Its state.
            control: Its control.
            logs: The line.

        Examples:
            >>> callback.on_log(args, state, control, logs={"loss": 1.0})  # doctest: +SKIP
        """
        if logs is None or "loss" not in logs or self.meter is None:
            return
        metrics = self.meter.metrics()
        logs.update(metrics)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stops counting, and warns if nothing was shared so far. Part of the interface of TrainerCallback.

        Args:
            args: The trainer's arguments.
            state: Its state.
            control: Its control.

        Examples:
            >>> callback.on_train_end(args, state, control)  # doctest: +SKIP
        """
        if self.meter is not None:
            self.meter.close()
            self.meter = None


def log_sharing(trainer: Any, *, verify: bool = False) -> SharingCallback:
    """Adds a SharingCallback to a Trainer, before its reporters, or moves an existing one to the front.

    Args:
        trainer: A Trainer of Transformers whose model is patched.
        verify: As in SharingCallback.

    Returns:
        The callback.

    Examples:
        >>> callback = espalier.hf.log_sharing(trainer)  # doctest: +SKIP
    """
    callbacks = trainer.callback_handler.callbacks
    given = next((each for each in callbacks if isinstance(each, SharingCallback)), None)
    if given is None:
        given = SharingCallback(verify=verify)
    else:
        callbacks.remove(given)
        given.verify = given.verify or verify
    callbacks.insert(0, given)
    return given
