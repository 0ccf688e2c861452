# SPDX-License-Identifier: Apache-2.0
"""In which order recurrences of a divided micro-batch run on its ranks, and which states they hand to one another."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .swap import NOTHING, Integers, OnRanks, Swap, swap_to


@dataclass(frozen=True)
class Pieces:
    """Runs of a micro-batch as its parts cut them: N pieces of consecutive tokens on one path, each on one rank.

    begin, end  [N] int64 ascending
    rank        [N] int64
    prev        [N] int64: the token before the piece; -1 at a root; -2 - n where it continues the parent's end n
    stage       [N] int64: after how many exchanges of states the piece can begin
    """

    begin: Integers
    end: Integers
    rank: Integers
    prev: Integers
    stage: Integers

    def of(self, tokens: Integers) -> Integers:
        """The piece of each token."""
        return np.searchsorted(self.begin, tokens, side="right") - 1

    def stage_of(self, tokens: Integers) -> Integers:
        return self.stage[self.of(tokens)]


@dataclass(frozen=True)
class Stage:
    """Tokens whose recurrences run between two exchanges of states.

    swap    before it: of states of the parent's frame (stage 0, None without a parent) or of the `ends` of the stage before
    own     int64: rows of the parent's frame that it reads itself; states are these, and then what is received
    tokens  [N] int64 ascending, in the part
    prev    [N] int32: among these; -2 - n where a token continues the state n
    ends    [E] int64: those of the tokens whose states others continue
    left    int64: which of the ends go to the frame
    """

    swap: Swap | None
    own: Integers
    tokens: Integers
    prev: NDArray[np.int32]
    ends: Integers
    left: Integers


class Schedule:
    """Of a micro-batch, as one rank sees it.

    ends    int64 ascending: the tokens after which other micro-batches continue
    before  the parent's ends, by their numbers, as its frames have them; None without a parent
    """

    def __init__(self, pieces: Pieces, ends: Integers, before: OnRanks | None, rank: int, ranks: int) -> None:
        self._pieces, self._left, self._before = pieces, ends, before
        self._rank, self._ranks = rank, ranks
        self._sent, self._sent_stage = self._all_sent()
        tokens = np.unique(np.concatenate([ends, self._sent.numbers]))
        self._ends, self._end_stage = OnRanks(tokens, pieces.rank[pieces.of(tokens)]), pieces.stage_of(tokens)

    def stages(self, tokens: Integers, prev: Integers, stages: Integers) -> list[Stage]:
        """tokens [T]: of the rank's part, ascending; prev: the tokens before them, as Pieces has them; stages: of each."""
        found = []
        for number in range(int(self._pieces.stage.max(initial=0)) + 1):
            which = np.flatnonzero(stages == number)
            swap, own, read = self._from_parent() if number == 0 else self._from_stage(number)
            held = self._ends.numbers[(self._end_stage == number) & (self._ends.ranks == self._rank)]
            left = np.flatnonzero(np.isin(held, self._left))
            found.append(Stage(swap, own, which, _with_states(tokens[which], prev[which], read),
                               np.searchsorted(tokens[which], held), left))  # fmt: skip
        return found

    def _all_sent(self) -> tuple[OnRanks, Integers]:
        """Tokens whose states pieces of other ranks continue, on those ranks, by rank and ascending; and the stage of these
        pieces."""
        pieces = self._pieces
        continued = np.flatnonzero(pieces.prev >= 0)
        continued = continued[pieces.rank[pieces.of(pieces.prev[continued])] != pieces.rank[continued]]
        ranks, numbers = _pairs(pieces.rank[continued], pieces.prev[continued])
        return OnRanks(numbers, ranks), pieces.stage_of(numbers) + 1

    def _from_stage(self, number: int) -> tuple[Swap, Integers, Integers]:
        held = self._ends.at(self._end_stage == number - 1)
        swap, received = swap_to(self._sent.at(self._sent_stage == number), held, self._rank, self._ranks)
        return swap, NOTHING, received

    def _from_parent(self) -> tuple[Swap | None, Integers, Integers]:
        """(swap, own, read): of the states of the parent's frame. read: -2 - n of its ends n, in the order of the states."""
        if self._before is None:
            return None, NOTHING, NOTHING
        roots = self._pieces.prev < -1
        ranks, numbers = _pairs(self._pieces.rank[roots], -2 - self._pieces.prev[roots])
        places = self._before.find(numbers)
        is_own = self._before.ranks[places] == ranks
        mine = is_own & (ranks == self._rank)
        swap, received = swap_to(OnRanks(numbers[~is_own], ranks[~is_own]), self._before, self._rank, self._ranks)
        return swap, self._before.rows()[places[mine]], -2 - np.concatenate([numbers[mine], received])


def left_of(pieces: Pieces, ends: Integers) -> OnRanks:
    """The ends of a micro-batch by their numbers, as frames have them: by stage, then ascending."""
    order = np.argsort(pieces.stage_of(ends), kind="stable")
    return OnRanks(order, pieces.rank[pieces.of(ends)][order])


def places_in(tokens: Integers, prev: NDArray[np.integer]) -> NDArray[np.int32]:
    """The places of `prev` among `tokens`, ascending; -1 where they are not."""
    if len(tokens) == 0:
        return np.full(len(prev), -1, np.int32)
    places = np.minimum(np.searchsorted(tokens, prev), len(tokens) - 1)
    return np.where(tokens[places] == prev, places, -1).astype(np.int32)


def _pairs(ranks: Integers, numbers: Integers) -> tuple[Integers, Integers]:
    """Different pairs, ascending."""
    found = np.unique(np.column_stack([ranks, numbers]), axis=0)
    return found[:, 0], found[:, 1]


def _with_states(tokens: Integers, prev: Integers, read: Integers) -> NDArray[np.int32]:
    """prev of the tokens of a stage, -2 - n where one continues the n-th of the states `read`."""
    found = places_in(tokens, prev)
    outside = np.flatnonzero((found < 0) & (prev != -1))
    order = np.argsort(read, kind="stable")
    found[outside] = -2 - order[np.searchsorted(read[order], prev[outside])]
    return found
