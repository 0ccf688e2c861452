# SPDX-License-Identifier: Apache-2.0
"""Exchanges of rows between ranks, by numbers."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
NOTHING: Integers = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Swap:
    """One exchange of rows between all ranks, as one of them sees it.

    picks     for each of its tensors int64: which rows others get, by receiver
    order     [S] int64: the picked rows of all tensors by receiver; None where they are
    send      [R] rows for each rank
    receive   [R] rows from each rank
    most      rows of the rank that receives most
    """

    picks: tuple[Integers, ...]
    order: Integers | None
    send: tuple[int, ...]
    receive: tuple[int, ...]
    most: int

    @property
    def is_needed(self) -> bool:
        """Whether any rank gets any."""
        return self.most > 0


def swap_of(picks: list[Integers], receivers: list[Integers], rank: int, counts: Integers) -> Swap:
    """The Swap of a rank. picks, receivers: rows of each of its tensors that others get, and who; counts: [R, R] rows that
    each rank (first) gets from each."""
    order = np.argsort(np.concatenate(receivers), kind="stable")
    is_ordered = len(picks) == 1 or np.array_equal(order, np.arange(len(order)))
    return Swap(tuple(picks), None if is_ordered else order, tuple(counts[:, rank].tolist()), tuple(counts[rank].tolist()),
                int(counts.sum(1).max(initial=0)))  # fmt: skip


@dataclass(frozen=True)
class OnRanks:
    """Things by their numbers, each on a rank: int64 [N] both. Those of one rank are its rows, in this order."""

    numbers: Integers
    ranks: Integers

    def at(self, which: NDArray[np.bool_] | Integers) -> "OnRanks":
        return OnRanks(self.numbers[which], self.ranks[which])

    def rows(self) -> Integers:
        """Which row of its rank each is."""
        order = np.argsort(self.ranks, kind="stable")
        ranks = self.ranks[order]
        found = np.empty(len(ranks), np.int64)
        found[order] = np.arange(len(ranks)) - np.searchsorted(ranks, ranks)
        return found

    def find(self, numbers: Integers) -> Integers:
        """The places of numbers that are there, once."""
        order = np.argsort(self.numbers, kind="stable")
        return order[np.searchsorted(self.numbers[order], numbers)]


def swap_to(wanted: OnRanks, held: OnRanks, rank: int, ranks: int) -> tuple[Swap, Integers]:
    """(Swap of rows that are held to the ranks that want them, numbers of what this rank receives, in that order). wanted: by
    rank, and on other ranks than that which holds them."""
    places = held.find(wanted.numbers)
    owners, rows = held.ranks[places], held.rows()[places]
    counts = np.zeros((ranks, ranks), np.int64)
    np.add.at(counts, (wanted.ranks, owners), 1)
    mine = owners == rank
    to_us = np.flatnonzero(wanted.ranks == rank)
    received = wanted.numbers[to_us[np.argsort(owners[to_us], kind="stable")]]
    return swap_of([rows[mine]], [wanted.ranks[mine]], rank, counts), received
