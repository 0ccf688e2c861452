# SPDX-License-Identifier: Apache-2.0
"""Trainers of TRL on trees of tokens: `espalier.trl.patch(trainer)` before `trainer.train()`."""

import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

from .errors import Unsupported
from .hf import SharingCallback, log_sharing
from .hf import patch as patch_model
from .trl_groups import set_keep_groups, splits_generations

__all__ = ["SharingCallback", "patch"]

Trainer = TypeVar("Trainer")

# By class of TRL: what trainers that are refused do.
_REFUSED = {"AsyncGRPOTrainer": "packs rows as prefix trees itself, for its own attention kernel"}
# By class of TRL: metrics that it takes over padding as well, where a patched model gives zeros.
_OVER_PADDING = {
    "ORPOTrainer": "logits/chosen and logits/rejected",
    "CPOTrainer": "logits/chosen and logits/rejected",
    "OnlineDPOTrainer": "objective/entropy, objective/kl, objective/non_score_reward and objective/rlhf_reward",
}


def patch(trainer: Trainer, *, backend: str = "auto", check: bool = False, keep_groups: bool = True, skip_logits: bool = False,
          dropout: str | None = None) -> Trainer:  # fmt: skip
    """Makes the model of a TRL trainer, its reference model and its teacher run on the forests of their batches.

    The log of training gets "espalier/tokens", "espalier/encoded_tokens" and "espalier/ratio" (SharingCallback). Warns where
    the trainer's settings separate rows of one group, so that less is shared, where optimiser steps consist of other rows
    than before, where a teacher is left as it is because its family is not proven on trees, and of metrics that TRL takes over
    padding, which a patched model does not compute.

    Args:
        trainer: SFTTrainer, DPOTrainer, GRPOTrainer, or another one whose models are Transformers'.
        backend: As in `espalier.hf.patch`.
        check: As in `espalier.hf.patch`; it concerns the model that is trained.
        keep_groups: For trainers that sample: shuffle groups instead of rows before a generation batch is cut into
            micro-batches, so that the generations of a prompt share it. Optimiser steps consist of the same rows as before if
            gradient_accumulation_steps is a multiple of steps_per_generation, as by default; docs/compatibility.md lists the
            losses for which the gradients are then the same, too.
        skip_logits: As in `espalier.hf.patch`; it concerns the model that is trained.
        dropout: As in `espalier.hf.patch`. Many trainers of TRL switch dropout off by themselves (disable_dropout=True).

    Returns:
        The trainer.

    Raises:
        Unsupported: As `espalier.hf.patch` does, and for trainers that docs/compatibility.md lists as refused. It is an
            InputError.

    Examples:
        >>> trainer = espalier.trl.patch(trainer)   # doctest: +SKIP
        >>> trainer.train()                         # doctest: +SKIP
    """
    model = getattr(trainer, "model", None)
    if model is None:
        raise Unsupported(f"espalier.trl.patch: expected a trainer with a model, received {type(trainer).__name__}")
    if (name := _listed(trainer, _REFUSED)) is not None:
        raise Unsupported(f"{name}: expected a trainer that hands rows of tokens to its model, received one that "
                          f"{_REFUSED[name]}; leave it unpatched")  # fmt: skip
    if (ref_model := getattr(trainer, "ref_model", None)) is not None:
        patch_model(ref_model, backend=backend, dropout=dropout)
    _patch_teacher(trainer, backend)
    # Last: it may be the teacher too, and keeps its check.
    patch_model(model, backend=backend, check=check, skip_logits=skip_logits, dropout=dropout)
    if (name := _listed(trainer, _OVER_PADDING)) is not None:
        warnings.warn(f"espalier.trl: {name} takes {_OVER_PADDING[name]} over padding too, where a patched model gives zeros: "
                      "these metrics differ from those of an unpatched model; the loss and its gradients do not",
                      stacklevel=2)  # fmt: skip
    if splits_generations(trainer):
        set_keep_groups(trainer, keep_groups)
        _warn_of_groups(getattr(trainer, "args", None), keep_groups)
    if hasattr(trainer, "callback_handler"):
        log_sharing(trainer)
    return trainer


def _listed(trainer: Any, table: Mapping[str, str]) -> str | None:
    """The class of TRL in `table` that the trainer is one of."""
    names = (cls.__name__ for cls in type(trainer).__mro__ if cls.__module__.startswith("trl."))
    return next((name for name in names if name in table), None)


def _patch_teacher(trainer: Any, backend: str) -> None:
    teacher = getattr(trainer, "teacher_model", None)
    if teacher is None:
        return
    try:
        patch_model(teacher, backend=backend)
    except Unsupported as error:
        warnings.warn(f"espalier.trl: teacher_model is left as it is, and encodes every row: {error}", stacklevel=3)


def _warn_of_groups(args: Any, keep_groups: bool) -> None:
    """Generations of one prompt should meet in one micro-batch."""
    generations = getattr(args, "num_generations", None)
    if generations is None:
        return
    steps, accumulated, rows = args.steps_per_generation, args.gradient_accumulation_steps, args.per_device_train_batch_size
    if not keep_groups and steps > 1:
        warnings.warn(f"espalier.trl: expected steps_per_generation=1 with keep_groups=False, received {steps}: TRL shuffles "
                      "generations before it splits them, and those of one prompt share it only within a batch",
                      stacklevel=3)  # fmt: skip
    if keep_groups and accumulated % steps:
        warnings.warn(f"espalier.trl: keep_groups=True with steps_per_generation={steps} and "
                      f"gradient_accumulation_steps={accumulated}: a generation batch feeds several optimiser steps, and each "
                      "is now made of whole groups instead of rows of all groups; keep_groups=False leaves rows where TRL "
                      "shuffles them", stacklevel=3)  # fmt: skip
    if rows % generations:
        warnings.warn(f"espalier.trl: expected per_device_train_batch_size to be a multiple of num_generations="
                      f"{generations}, received {rows}: generations of one prompt share it only within a batch",
                      stacklevel=3)  # fmt: skip
