# SPDX-License-Identifier: Apache-2.0
"""How recurrences of a divided micro-batch run on its ranks, and what these hand to one another.

States of a recurrence are S' = A S + B along a path. Where paths cross ranks, each rank first computes A and B of what others
continue, as if nothing came before; ranks exchange these once, and find by them the states with which their own tokens begin.
So no rank waits for the recurrences of another (a scan over shards).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..hf.exchange import Integers, Swap
from ..hf.part_run import First, Scan

NOTHING: Integers = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Pieces:
    """Runs of a micro-batch as its shards cut them: N pieces of consecutive tokens on one path, each on one rank.

    begin, end  [N] int64 ascending
    rank        [N] int64
    prev        [N] int64: the token before the piece; -1 at a root; -2 - n where it continues the parent's end n
    """

    begin: Integers
    end: Integers
    rank: Integers
    prev: Integers

    def of(self, tokens: Integers) -> Integers:
        """The piece of each token."""
        return np.searchsorted(self.begin, tokens, side="right") - 1


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
        return _found(self.numbers, numbers)


class Schedule:
    """Of a micro-batch, as one rank sees it.

    ends    int64 ascending: the tokens after which other micro-batches continue
    before  the parent's ends, by their numbers, as its frames have them; None without a parent
    """

    def __init__(self, pieces: Pieces, ends: Integers, before: OnRanks | None, rank: int, ranks: int) -> None:
        self._pieces, self._before, self._rank, self._ranks = pieces, before, rank, ranks
        self._ends = ends[pieces.rank[pieces.of(ends)] == rank]
        self._previous = np.where(pieces.prev >= 0, pieces.of(pieces.prev), -1)  # the piece of the token before each
        crossing = np.flatnonzero((pieces.prev >= 0) & (pieces.rank[self._previous] != pieces.rank))
        numbers = np.unique(pieces.prev[crossing])
        self._sent = OnRanks(numbers, pieces.rank[pieces.of(numbers)])
        self._entry = self._entries(crossing)
        starts = [np.unique(pieces.prev[crossing[pieces.rank[crossing] == other]]) for other in range(ranks)]
        self._starts, self._known = starts[rank], [self._all_before(tokens) for tokens in starts]

    def scan(self, tokens: Integers, prev: Integers) -> Scan:
        """tokens [T]: of the rank's shard, ascending; prev: the tokens before them, as Pieces has them."""
        from_parent, own, parent_reads = self._from_parent()
        held = self._sent.at(self._sent.ranks == self._rank).numbers
        swap, kept, known = self._summaries(held)
        entry = self._entry[self._pieces.of(known)]
        first, read = self._first(tokens, prev, held, parent_reads), np.concatenate([parent_reads, self._starts])
        return Scan(from_parent, own, first, swap, kept, _levels(known, entry), _found(known, self._starts),
                    _with_states(tokens, prev, read), np.searchsorted(tokens, self._ends))  # fmt: skip

    def _entries(self, crossing: Integers) -> Integers:
        """For each piece the token of another rank from which its path comes, -1 for none."""
        found = np.full(len(self._pieces.begin), -1, np.int64)
        found[crossing] = self._pieces.prev[crossing]
        for piece, previous in enumerate(self._previous):  # which has a lower number
            if previous >= 0 and found[piece] < 0:
                found[piece] = found[previous]
        return found

    def _all_before(self, starts: Integers) -> Integers:
        """The sent tokens from which paths come to `starts`, these among them, ascending."""
        found, more = starts, starts
        while len(more):
            entries = np.unique(self._entry[self._pieces.of(more)])
            more = np.setdiff1d(entries[entries >= 0], found)
            found = np.union1d(found, more)
        return found

    def _summaries(self, held: Integers) -> tuple[Swap | None, Integers, Integers]:
        """(swap, kept, known): what this rank has and receives, in that order."""
        ranks = np.repeat(np.arange(self._ranks), [len(tokens) for tokens in self._known])
        wanted = OnRanks(np.concatenate([NOTHING, *self._known]), ranks)
        if len(ranks) == 0:
            return None, NOTHING, NOTHING
        is_own = self._sent.ranks[self._sent.find(wanted.numbers)] == ranks
        swap, received = swap_to(wanted.at(~is_own), self._sent, self._rank, self._ranks)
        mine = wanted.numbers[is_own & (ranks == self._rank)]
        return swap, np.searchsorted(held, mine), np.concatenate([mine, received])

    def _first(self, tokens: Integers, prev: Integers, held: Integers, parent_reads: Integers) -> First:
        pieces, last = self._pieces, np.full(len(self._pieces.begin), -1, np.int64)  # the last token of each that is needed
        np.maximum.at(last, pieces.of(held), held)
        for piece in np.flatnonzero(pieces.rank == self._rank)[::-1]:
            previous = self._previous[piece]
            if last[piece] >= 0 and previous >= 0 and pieces.rank[previous] == self._rank:
                last[previous] = max(last[previous], pieces.prev[piece])
        needed = np.flatnonzero(last >= 0)
        numbers = np.concatenate([NOTHING, *(np.arange(pieces.begin[piece], last[piece] + 1) for piece in needed)])
        places = np.searchsorted(tokens, numbers)
        before = prev[places]
        is_open = (before >= 0) & (places_in(numbers, before) < 0)
        first_prev = _with_states(numbers, np.where(is_open, -1, before), parent_reads)
        opened = np.where(is_open, np.int32(-2), np.maximum(first_prev, -1))
        return First(places, first_prev, opened, np.searchsorted(numbers, held))

    def _from_parent(self) -> tuple[Swap | None, Integers, Integers]:
        """(swap, own, read): of the states of the parent's frame. read: -2 - n of its ends n, in the order of the states."""
        if self._before is None:
            return None, NOTHING, NOTHING
        roots = self._pieces.prev < -1
        pairs = np.unique(np.column_stack([self._pieces.rank[roots], -2 - self._pieces.prev[roots]]), axis=0)
        ranks, numbers = pairs[:, 0], pairs[:, 1]
        places = self._before.find(numbers)
        is_own = self._before.ranks[places] == ranks
        mine = is_own & (ranks == self._rank)
        swap, received = swap_to(OnRanks(numbers[~is_own], ranks[~is_own]), self._before, self._rank, self._ranks)
        return swap, self._before.rows()[places[mine]], -2 - np.concatenate([numbers[mine], received])


def swap_to(wanted: OnRanks, held: OnRanks, rank: int, ranks: int) -> tuple[Swap, Integers]:
    """(Swap of rows that are held to the ranks that want them, numbers of what this rank receives, in that order). wanted: by
    rank, and on other ranks than that which holds them."""
    places = held.find(wanted.numbers)
    owners, rows = held.ranks[places], held.rows()[places]
    counts = np.zeros((ranks, ranks), np.int64)
    np.add.at(counts, (wanted.ranks, owners), 1)
    to_us = np.flatnonzero(wanted.ranks == rank)
    received = wanted.numbers[to_us[np.argsort(owners[to_us], kind="stable")]]
    swap = Swap((rows[owners == rank],), NOTHING, counts[:, rank], counts[rank], int(counts.sum(1).max(initial=0)))
    return swap, received


def left_of(pieces: Pieces, ends: Integers) -> OnRanks:
    """The ends of a micro-batch by their numbers, as frames have them."""
    return OnRanks(np.arange(len(ends)), pieces.rank[pieces.of(ends)])


def places_in(tokens: Integers, prev: NDArray[np.integer]) -> NDArray[np.int32]:
    """The places of `prev` among `tokens`, ascending; -1 where they are not."""
    if len(tokens) == 0:
        return np.full(len(prev), -1, np.int32)
    places = np.minimum(np.searchsorted(tokens, prev), len(tokens) - 1)
    return np.where(tokens[places] == prev, places, -1).astype(np.int32)


def _found(numbers: Integers, wanted: Integers) -> Integers:
    """The places of `wanted` among different numbers, which have them."""
    order = np.argsort(numbers, kind="stable")
    return order[np.searchsorted(numbers[order], wanted)]


def _levels(known: Integers, entry: Integers) -> list[tuple[Integers, Integers]]:
    """As Scan has them. entry: the number of the one before each, -1 for none."""
    depth = {-1: -1}
    for number, before in sorted(zip(known.tolist(), entry.tolist())):  # paths go from lower numbers to higher ones
        depth[number] = depth[before] + 1
    depths = np.array([depth[number] for number in known.tolist()], np.int64)
    found = [np.flatnonzero(depths == level) for level in range(1, int(depths.max(initial=0)) + 1)]
    return [(which, _found(known, entry[which])) for which in found]


def _with_states(tokens: Integers, prev: Integers, read: Integers) -> NDArray[np.int32]:
    """prev among the tokens, -2 - n where one continues the n-th of the states `read`."""
    found = places_in(tokens, prev)
    outside = np.flatnonzero((found < 0) & (prev != -1))
    found[outside] = -2 - _found(read, prev[outside])
    return found
