# SPDX-License-Identifier: Apache-2.0
"""A forest as waves of sequences, for libraries of recurrences that know sequences with initial and final states.

A sequence is a run of tokens of which each follows the one before and has no other child; it begins with the final state of
the sequence above it. Sequences with equally many above them are one wave, the longest first, which a library computes in one
call, or if it wants sequences of one length in a few.
"""

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

CHUNK = 64  # tokens of a chunk of the composed form


class Wave(NamedTuple):
    """Rows `begin` to `end` in the order of waves."""

    number: int
    begin: int
    end: int
    cu_seqlens: Tensor  # [N + 1] int64 on the device: where its sequences begin, the first at 0
    cu_seqlens_cpu: Tensor
    source: Tensor  # [N] int64 on the device: the rows of their initial states among the final states of the wave before
    is_continued: bool  # whether its final states are wanted
    has_ends: bool  # by the caller as well


class Batch(NamedTuple):
    """Sequences of a wave of similar lengths, `first` and those after it, whose rows in the wave are `begin` to `end`."""

    first: int
    sequences: int
    begin: int
    end: int
    longest: int
    place: Tensor | None  # [end - begin] int64 on the device: its rows in [sequences * longest]; None where lengths are equal

    def filled(self, rows: Tensor) -> Tensor:
        """[sequences, longest, ...] of rows of the wave, with zeros at the ends of shorter sequences."""
        rows = rows[self.begin:self.end]
        if self.place is not None:
            rows = rows.new_zeros((self.sequences * self.longest, *rows.shape[1:])).index_copy_(0, self.place, rows)
        return rows.unflatten(0, (self.sequences, self.longest))

    def emptied(self, filled: Tensor) -> Tensor:
        """The rows of `filled` without those zeros."""
        rows = filled.flatten(0, 1)
        return rows if self.place is None else rows.index_select(0, self.place)


Step = Callable[[Wave, Sequence[Tensor], Tensor | None], tuple[Tensor, Tensor | None]]


class Waves:
    """prev [T] int32 and ends [E] int64 on the CPU, as the operators have them.

    waves       in their order; of the first, `source` counts from 1 in the caller's states, and 0 is the state of zeros
    num_levels  chunks on the longest path, of `CHUNK` tokens at most, which the composed form computes one after another
    """

    def __init__(self, prev: Tensor, ends: Tensor, device: torch.device) -> None:
        before, wanted = prev.numpy().astype(np.int64), ends.numpy()
        starts, number = _sequences(before, wanted)
        lengths, above = np.diff(starts, append=len(before)), before[starts]
        parents = np.where(above >= 0, number[above], -1)
        depth, level = np.zeros_like(parents), -(-lengths // CHUNK)
        for sequence, parent in enumerate(parents.tolist()):  # parents come first
            if parent >= 0:
                depth[sequence] = depth[parent] + 1
                level[sequence] += level[parent]
        self.num_levels = int(level.max())
        order = np.lexsort((-lengths, depth))  # sequences by wave
        bounds = np.searchsorted(depth[order], np.arange(depth.max() + 2))
        rank = np.empty_like(order)  # in its wave
        rank[order] = np.arange(len(order)) - bounds[depth[order]]
        source = np.where(parents >= 0, rank[parents], np.where(above == -1, 0, -1 - above))  # -2 - n: states[n]
        place = np.empty_like(order)  # among all sequences
        place[order] = np.arange(len(order))
        tokens = np.argsort(place[number], kind="stable")
        is_same = bool((tokens[1:] > tokens[:-1]).all())
        self._device = device
        self._order = None if is_same else torch.from_numpy(tokens).to(device)
        self._place = None if is_same else torch.from_numpy(np.argsort(tokens)).to(device)
        has_ends = np.zeros(len(bounds) - 1, bool)
        has_ends[depth[number[wanted]]] = True
        self.waves: list[Wave] = []
        row = 0
        for wave, (begin, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist())):
            chosen = order[begin:end]
            borders = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths[chosen])]))
            is_last = wave == len(bounds) - 2
            self.waves.append(Wave(wave, row, row + int(borders[-1]), borders.to(device), borders,
                                   torch.from_numpy(source[chosen]).to(device), bool(has_ends[wave]) or not is_last,
                                   bool(has_ends[wave])))  # fmt: skip
            row += int(borders[-1])
        kept = np.cumsum(np.where(has_ends, np.diff(bounds), 0)) - np.where(has_ends, np.diff(bounds), 0)
        last = number[wanted]
        self._ends = torch.from_numpy(kept[depth[last]] + rank[last]).to(device)

    @functools.cached_property
    def batches(self) -> list[list[Batch]]:
        """Of each wave, for libraries that fill sequences up: those of at most CHUNK tokens, of twice as many, and so on."""
        return [list(_batches(wave.cu_seqlens_cpu.numpy(), self._device)) for wave in self.waves]

    def scan(self, rows: Sequence[Tensor], states: Tensor | None, shape: Sequence[int], step: Step) -> tuple[Tensor, Tensor]:
        """(out [T, ...], states after the ends [E, *shape]) of step(wave, its rows, its initial states or None for zeros),
        which gives the outputs of a wave and its final states.

        rows: tensors [T, ...], the last in the dtype of states; states: [N, *shape], from which paths go on."""
        rows = [each.contiguous() if self._order is None else each.index_select(0, self._order) for each in rows]
        before = None if states is None else torch.cat([states.new_zeros((1, *shape)), states])
        outs, kept = [], []
        for wave in self.waves:
            initial = None if before is None else before.index_select(0, wave.source)
            out, before = step(wave, [each[wave.begin:wave.end] for each in rows], initial)
            outs.append(out)
            if wave.has_ends:
                assert before is not None
                kept.append(before)
        out = joined(outs) if self._place is None else joined(outs).index_select(0, self._place)
        return out, joined(kept).index_select(0, self._ends) if kept else rows[-1].new_empty((0, *shape))


def _sequences(before: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(first token of each sequence, [T] the sequence of each token)."""
    follows = before == np.arange(len(before)) - 1
    is_last = np.bincount(before[before >= 0], minlength=len(before)) > 1
    is_last[ends] = True
    follows[0] = False
    follows[1:] &= ~is_last[:-1]
    return np.flatnonzero(~follows), np.cumsum(~follows) - 1


def _batches(borders: NDArray[np.int64], device: torch.device) -> Iterator[Batch]:
    lengths = np.diff(borders)
    kinds = np.frexp(-(-lengths // CHUNK) - 1)[1]  # the bits of the number: 0 for one chunk, 1 for two, 2 for up to four
    starts = np.flatnonzero(np.diff(kinds, prepend=-1))
    for first, last in zip(starts.tolist(), [*starts[1:].tolist(), len(lengths)]):
        sizes, longest = lengths[first:last], int(lengths[first])
        begin, end = int(borders[first]), int(borders[last])
        place = None
        if longest != lengths[last - 1]:
            skipped = np.arange(len(sizes)) * longest - (borders[first:last] - begin)
            place = torch.from_numpy(np.arange(end - begin) + np.repeat(skipped, sizes)).to(device)
        yield Batch(first, last - first, begin, end, longest, place)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """One after another; a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


Kept = TypeVar("Kept")
_kept: Any = WeakTensorKeyDictionary()  # by the tensors that say what a forest is


def kept_of(forest: Tensor, key: Hashable, make: Callable[[], Kept]) -> Kept:
    """What `make` gives, by `key`, kept while the tensor `forest` is there and stays as it is."""
    if forest.is_inference():  # which does not say when it is changed
        return make()
    found = _kept.setdefault(forest, {})
    key = forest._version, key
    if key not in found:
        found[key] = make()
    return found[key]


def waves_of(prev: Tensor, ends: Tensor, device: torch.device) -> Waves:
    """Waves of `prev` on `device`, which the layers of a micro-batch share."""
    return kept_of(prev, (ends.numpy().tobytes(), device), lambda: Waves(prev, ends, device))
