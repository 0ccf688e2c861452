# SPDX-License-Identifier: Apache-2.0
"""Trainers of TRL on trees of tokens: `espalier.trl.patch(trainer)` before `trainer.train()`."""

import warnings
from typing import Any, TypeVar

from .errors import Unsupported
from .hf import patch as patch_model

__all__ = ["patch"]

Trainer = TypeVar("Trainer")


def patch(trainer: Trainer, *, backend: str = "auto", check: bool = False) -> Trainer:
    """Makes the model of a TRL trainer, and its reference model, run on the forests of their batches.

    Warns where the trainer's settings take rows of one group apart, so that less is shared.

    Args:
        trainer: SFTTrainer, DPOTrainer, GRPOTrainer, or another one whose models are Transformers'.
        backend: As in `espalier.hf.patch`.
        check: As in `espalier.hf.patch`; it concerns the model that is trained.

    Returns:
        The trainer.

    Raises:
        Unsupported: As `espalier.hf.patch` does. It is an InputError.

    Examples:
        >>> trainer = espalier.trl.patch(trainer)   # doctest: +SKIP
        >>> trainer.train()                         # doctest: +SKIP
    """
    model = getattr(trainer, "model", None)
    if model is None:
        raise Unsupported(f"espalier.trl.patch: expected a trainer with a model, received {type(trainer).__name__}")
    patch_model(model, backend=backend, check=check)
    if (ref_model := getattr(trainer, "ref_model", None)) is not None:
        patch_model(ref_model, backend=backend)
    _warn_of_lost_sharing(getattr(trainer, "args", None))
    return trainer


def _warn_of_lost_sharing(args: Any) -> None:
    """Generations of one prompt should meet in one batch."""
    generations = getattr(args, "num_generations", None)
    if generations is None:
        return
    steps, rows = args.steps_per_generation, args.per_device_train_batch_size
    if steps > 1:
        warnings.warn(f"espalier.trl: expected steps_per_generation=1, received {steps}: TRL shuffles generations "
                      "before it splits them, and those of one prompt share it only within a batch",
                      stacklevel=3)  # fmt: skip
    if rows % generations:
        warnings.warn(f"espalier.trl: expected per_device_train_batch_size to be a multiple of num_generations="
                      f"{generations}, received {rows}: generations of one prompt share it only within a batch",
                      stacklevel=3)  # fmt: skip
