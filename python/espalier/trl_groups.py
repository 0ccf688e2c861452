# SPDX-License-Identifier: Apache-2.0
"""Generations of one prompt stay together where a TRL trainer cuts what it has generated into micro-batches.

TRL shuffles the rows of a generation batch, and cuts it into `steps_per_generation` micro-batches. Here groups are shuffled
instead of rows, so that the generations of a prompt meet in a micro-batch and share it."""

import contextvars
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SHUFFLE = "shuffle_sequence_dict"  # what TRL's trainers call between generating and cutting

_keeps_groups: contextvars.ContextVar[bool] = contextvars.ContextVar("espalier_keeps_groups", default=False)


def splits_generations(trainer: Any) -> bool:
    """Whether `trainer` shuffles and cuts generation batches as TRL 1.12 to 1.16 do."""
    return hasattr(trainer, "_prepare_inputs") and any(SHUFFLE in names for names in _namespaces(trainer))


def set_keep_groups(trainer: Any, keep_groups: bool) -> None:
    """Makes `trainer` shuffle groups, or rows again as TRL has it. Other trainers of the process stay as they are."""
    given = trainer.__dict__.get("_prepare_inputs")
    if not keep_groups:
        if isinstance(given, _KeepingGroups):
            del trainer._prepare_inputs
        return
    for names in _namespaces(trainer):
        if SHUFFLE in names and not isinstance(names[SHUFFLE], _Shuffle):
            names[SHUFFLE] = _Shuffle(names[SHUFFLE])
    if not isinstance(given, _KeepingGroups):
        trainer._prepare_inputs = _KeepingGroups(trainer._prepare_inputs)


def _namespaces(trainer: Any) -> list[dict[str, Any]]:
    """Those of the modules that define the trainer's class and its bases."""
    modules = (sys.modules.get(cls.__module__) for cls in type(trainer).__mro__)
    return [module.__dict__ for module in modules if module is not None]


class _KeepingGroups:
    """The `_prepare_inputs` of a trainer, during which shuffling keeps groups together."""

    def __init__(self, prepare: Callable[..., Any]) -> None:
        self._prepare = prepare

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = _keeps_groups.set(True)
        try:
            return self._prepare(*args, **kwargs)
        finally:
            _keeps_groups.reset(token)


class _Shuffle:
    """TRL's function, or ours during the `_prepare_inputs` of a trainer that keeps groups."""

    def __init__(self, original: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._original = original

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if not _keeps_groups.get() or batch.get("prompt_ids") is None:
            return self._original(batch)
        order = order_of_groups(batch["prompt_ids"], batch.get("prompt_mask"))
        return {name: _reordered(values, order) for name, values in batch.items()}


def order_of_groups(prompt_ids: Tensor, prompt_mask: Tensor | None = None) -> Tensor:
    """A random order [R] int64 of rows in which those with equal prompts follow one another.

    prompt_ids [R, P] integers; prompt_mask [R, P]: 0 where padding is. Draws from torch's random numbers what TRL's
    shuffling draws, so that all that is drawn later stays the same."""
    ids = prompt_ids if prompt_mask is None else prompt_ids.masked_fill(prompt_mask == 0, -1)
    group_of_row = torch.unique(ids.cpu(), dim=0, return_inverse=True)[1]
    order = torch.randperm(len(ids)).cpu()
    groups = group_of_row[order]
    places = torch.arange(len(ids), device="cpu")
    first_place = order.new_full((int(groups.max()) + 1,), len(ids)).scatter_reduce(0, groups, places, "amin")
    return order[torch.argsort(first_place[groups], stable=True)]


def _reordered(values: Any, order: Tensor) -> Any:
    if values is None or (isinstance(values, Tensor) and values.ndim == 0):
        return values
    return values[order.to(values.device)] if isinstance(values, Tensor) else [values[i] for i in order.tolist()]
