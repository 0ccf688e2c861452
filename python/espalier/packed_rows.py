# SPDX-License-Identifier: Apache-2.0
"""Micro-batches of whole rows, with padding, for other libraries: what `espalier.megatron` and `espalier.titan` share."""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from .errors import InputError
from .rows.loss_masks import term_weights
from .trees import Layout, Plan

Integers = NDArray[np.int64]


def check_plan(plan: object) -> None:
    """Raises InputError unless `plan` is a Plan whose micro-batches have whole rows."""
    if not isinstance(plan, Plan):
        raise InputError(f"plan: expected a Plan, as espalier.plan makes it, received {type(plan).__name__}")
    for batch in plan:
        if batch.parent >= 0:
            raise InputError('plan: expected micro-batches of whole rows, as strategy="tree-packing" makes them, received '
                             f"{plan.strategy}, whose micro-batch {batch.index} reads tokens of others")


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def row_weights(loss_mask: Any, layouts: list[Layout]) -> list[NDArray[np.float64]]:
    """The weights of the tokens of each row of the forest, 0 for first tokens.

    loss_mask  as espalier.Step takes it; None for 1 everywhere
    layouts    those of all micro-batches"""
    paths = {row: length for layout in layouts for row, length in zip(layout.trajectories.tolist(), np.diff(layout.paths()[0]))}
    offsets = np.cumsum([0, *(paths[row] for row in range(len(paths)))])
    return np.split(term_weights(loss_mask, offsets), offsets[1:-1])


class Padding(NamedTuple):
    """T packed tokens: those of a layout, with padding at the end of each of its parts."""

    ends: Integers  # [parts + 1] cumulative lengths with padding
    places: Integers  # [tokens of the layout]: which packed token each is
    pads: Integers  # [parts, 2]: the packed tokens [begin, end) that pad each part

    @classmethod
    def of(cls, bounds: NDArray[Any], multiple: int) -> "Padding":
        """Part k is the layout's tokens [bounds[k], bounds[k + 1]), of which the last bound is the number."""
        lengths = np.diff(bounds)
        ends = np.append(0, np.cumsum(-(-lengths // multiple) * multiple))
        places = np.arange(bounds[-1]) + np.repeat(ends[:-1] - bounds[:-1], lengths)
        return cls(ends, places, np.stack([ends[:-1] + lengths, ends[1:]], axis=1))

    def spread(self, values: NDArray[Any], fill: int) -> Integers:
        """[T] int64 of one number for each token of the layout."""
        spread = np.full(self.ends[-1], fill, np.int64)
        spread[self.places] = values
        return spread

    def subtree_end(self, layout: Layout) -> Integers:
        """[T]: packed token j sees packed token i if i <= j < subtree_end[i]; 0 for padding."""
        return self.spread(self.places[layout.subtree_end - 1] + 1, 0)


class RowTokens(NamedTuple):
    """Where N tokens of R rows are among T packed tokens."""

    rows: Integers  # [R]: their numbers in the forest, ascending
    offsets: Integers  # [R + 1]: row rows[k] consists of the packed tokens tokens[offsets[k]:offsets[k + 1]]
    tokens: Integers  # [N]
    places: Integers  # [T]: the first place in `tokens` that has the packed token, -1 for padding

    @classmethod
    def of(cls, layout: Layout, padding: Padding) -> "RowTokens":
        offsets, path = layout.paths()
        tokens = padding.places[path]
        places = np.full(padding.ends[-1], -1)
        places[tokens[::-1]] = np.arange(len(path))[::-1]
        return cls(layout.trajectories, offsets, tokens, places)


@dataclass(frozen=True, kw_only=True)
class PackedTensors:
    """Tensors of one micro-batch of T packed tokens, with those that lead from its R rows of N tokens to them.

    Attributes:
        subtree_end: [T]: packed token j sees packed token i if i <= j < subtree_end[i].
        rows: As of RowTokens, and so the next three.
        row_offsets: [R + 1].
        row_tokens: [N].
        places: [T].
    """

    subtree_end: torch.Tensor
    rows: torch.Tensor
    row_offsets: torch.Tensor
    row_tokens: torch.Tensor
    places: torch.Tensor

    def to(self, device: torch.device | str) -> Self:
        """The same with all tensors on `device`.

        Args:
            device: As `torch.Tensor.to` takes it.

        Returns:
            An object of the same class.

        Examples:
            >>> import espalier
            >>> plan = espalier.plan(espalier.build([[1, 2, 3]]), token_budget=8, strategy="tree-packing")
            >>> espalier.titan.pack(plan)[0].to("cpu").tokens.device.type
            'cpu'
        """
        return type(self)(**{field.name: _on_device(getattr(self, field.name), device) for field in fields(self)})


def _on_device(value: Any, device: torch.device | str) -> Any:
    """A tensor, or what has tensors in it, on a device. Tuples with names keep them."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _on_device(each, device) for name, each in value.items()}
    if not isinstance(value, tuple):
        return value
    moved = [_on_device(each, device) for each in value]
    return type(value)._make(moved) if hasattr(value, "_make") else tuple(moved)
