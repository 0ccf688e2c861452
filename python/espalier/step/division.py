# SPDX-License-Identifier: Apache-2.0
"""The micro-batches of a plan, each divided over ranks: what a rank has of it, and which rows it exchanges with others.

All of it follows from the plan, so that every rank knows what the others will send and want."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .cutting import Cutting, cut
from .plan import StepPlan, Terms
from .schedule import Pieces, Scan, Schedule, left_of, places_in
from .swap import NOTHING, Swap, swap_of

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """What one rank has of the tokens of a micro-batch, T of them, as a forest. A rank without any has a stand-in:
    a copy of the first token that sees nothing, and that nobody sees.

    tokens       [T] int64 ascending: their numbers in the micro-batch
    position_ids [T] int32
    subtree_end  [T] int32: among the tokens of the part
    prev         [T] int32: likewise, -1 where the token before is elsewhere or nowhere
    input_ids    [T]
    longest      positions of the deepest token of the whole micro-batch and all before it
    is_stand_in  whether it is one
    """

    tokens: Integers
    position_ids: NDArray[np.int32]
    subtree_end: NDArray[np.int32]
    prev: NDArray[np.int32]
    input_ids: NDArray[np.int32]
    longest: int
    is_stand_in: bool

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class KeyReads:
    """Keys and values that the queries of a part see elsewhere.

    swap       of tensors of the ancestors' frames and then the part's own
    blocks     [P, 5] int64, as ops.tree_attention has them; segments are the frames, and then what is received
    positions  [P] int64: of each block's first key
    """

    swap: Swap
    blocks: Integers
    positions: Integers


class Division:
    """The micro-batches of a StepPlan over the ranks of a group.

    parts_of_rank  how many parts of a micro-batch each rank gets
    pair           what a visible pair costs, in tokens
    """

    def __init__(self, plan: StepPlan, rank: int, ranks: int, parts_of_rank: int, pair: float) -> None:
        self.plan, self.rank, self.ranks = plan, rank, ranks
        self._parts_of_rank, self._pair = parts_of_rank, pair
        self._cuttings: dict[int, Cutting] = {}
        self._pieces: dict[int, Pieces] = {}
        self.layout, self.tokens = lru_cache(8)(plan.layout), lru_cache(64)(self._tokens)

    def digest(self) -> str:
        """What has to be the same on all ranks of the group, as text."""
        return f"{self.plan.digest()}, {self._parts_of_rank} parts of a rank, {self._pair!r} for a pair"

    def imbalance(self) -> float:
        """How much longer the step takes than with equal costs of all ranks, as a part of it, by what tokens and pairs cost."""
        found = [self._cutting(batch).costs for batch in self.plan.running]
        mean = sum(costs.mean() for costs in found)
        return float(sum(costs.max() for costs in found) / mean - 1) if mean else 0.0

    def part(self, batch: int) -> Part:
        layout, tokens = self.layout(batch), self.tokens(batch, self.rank)
        longest = int(layout.position_ids.max(initial=-1)) + 1
        if len(tokens) == 0:
            none = np.full(1, -1, np.int32)
            return Part(np.zeros(1, np.int64), layout.position_ids[:1], np.ones(1, np.int32), none, layout.input_ids[:1],
                        longest, True)  # fmt: skip
        ends = np.searchsorted(tokens, layout.subtree_end[tokens]).astype(np.int32)
        return Part(tokens, layout.position_ids[tokens], ends, places_in(tokens, layout.prev[tokens]),
                    layout.input_ids[tokens], longest, False)  # fmt: skip

    def terms(self, batch: int) -> Terms:
        """Terms of the edges whose sources are tokens of the part."""
        terms, tokens = self.plan.terms(batch, self.layout(batch)), self.tokens(batch, self.rank)
        sources = terms.sources[terms.edge_row]
        is_ours = np.isin(sources, tokens)
        number = np.cumsum(is_ours) - 1
        mine = is_ours[terms.edges]
        places, edge_row = np.unique(np.searchsorted(tokens, sources[is_ours]), return_inverse=True)
        return replace(terms, rows=terms.rows[mine], positions=terms.positions[mine], weights=terms.weights[mine],
                       edges=number[terms.edges[mine]], sources=places, edge_row=edge_row.reshape(-1),
                       edge_target=terms.edge_target[is_ours])  # fmt: skip

    def keys(self, batch: int, window: int = 0, chunk: int = 0) -> KeyReads:
        """What attention reads with a sliding window or in chunks, as hf.asked_attention.Attention has them."""
        table = self._blocks(batch)
        wanted = [self._wanted(batch, table, rank, window, chunk) for rank in range(self.ranks)]
        counts = np.zeros((self.ranks, self.ranks), np.int64)
        for rank, blocks in enumerate(wanted):
            counts[rank] = np.bincount(blocks.owner, blocks.key_end - blocks.key_begin, self.ranks)
        np.fill_diagonal(counts, 0)
        own = table.num_sources - 1
        picks: list[list[Integers]] = [[NOTHING] for _ in range(own + 1)]
        receivers: list[list[Integers]] = [[NOTHING] for _ in range(own + 1)]
        for rank in np.flatnonzero(counts[:, self.rank]).tolist():
            blocks = wanted[rank]
            for number in np.flatnonzero(blocks.owner == self.rank):
                keys, source = np.arange(blocks.key_begin[number], blocks.key_end[number]), blocks.source[number]
                picks[source].append(keys)
                receivers[source].append(np.full(len(keys), rank))
        swap = swap_of([np.concatenate(each) for each in picks], [np.concatenate(each) for each in receivers], self.rank, counts)
        return KeyReads(swap, *self._read(wanted[self.rank], own))

    def scan(self, batch: int) -> Scan:
        """How recurrences run."""
        part, parent = self.part(batch), self.plan.parent[batch]
        before = None if parent < 0 else left_of(self.pieces(parent), self.plan.ends(parent))
        schedule = Schedule(self.pieces(batch), self.plan.ends(batch), before, self.rank, self.ranks)
        if part.is_stand_in:
            return schedule.scan(part.tokens, np.full(1, -1))
        return schedule.scan(part.tokens, self.plan.prev(batch, self.layout(batch))[part.tokens].astype(np.int64))

    def pieces(self, batch: int) -> Pieces:
        if batch not in self._pieces:
            self._pieces[batch] = self._cut_runs(batch)
        return self._pieces[batch]

    def _tokens(self, batch: int, rank: int) -> Integers:
        """int64 ascending: those of a rank; none where it has a stand-in."""
        cutting = self._cutting(batch)
        parts = np.flatnonzero(cutting.ranks == rank)
        return np.concatenate([NOTHING, *(np.arange(cutting.begin[part], cutting.begin[part + 1]) for part in parts)])

    def _cutting(self, batch: int) -> Cutting:
        if batch not in self._cuttings:
            layout = self.layout(batch)
            begins = layout.run_begin[:-1].astype(np.int64)
            branches = begins[layout.prev[begins] != begins - 1]
            positions = layout.position_ids.astype(np.int64)
            self._cuttings[batch] = cut(positions, branches, self.ranks, self._parts_of_rank, self._pair)
        return self._cuttings[batch]

    def _cut_runs(self, batch: int) -> Pieces:
        layout, cutting = self.layout(batch), self._cutting(batch)
        begin = np.unique(np.concatenate([layout.run_begin[:-1].astype(np.int64), cutting.begin[:-1]]))
        end = np.append(begin[1:], layout.num_tokens)
        rank = cutting.ranks[np.searchsorted(cutting.begin, begin, side="right") - 1]
        return Pieces(begin, end, rank, self.plan.prev(batch, layout)[begin].astype(np.int64))

    def _blocks(self, batch: int) -> "_Blocks":
        """Keys of one rank that the same queries of the micro-batch see, all of them: ancestors first, then the micro-batch."""
        layout, pieces, reads = self.layout(batch), self.pieces(batch), self.plan.context(batch)
        found = []
        for source, ancestor in enumerate(reads.ancestors):
            rows = np.flatnonzero(reads.blocks[:, 0] == source)
            found.append(_of_ancestor(self.pieces(ancestor), source, reads.blocks[rows], reads.positions[rows]))
        own = len(reads.ancestors)
        found.append(_Blocks(np.full(len(pieces.begin), own), pieces.begin, pieces.end, pieces.end,
                             layout.subtree_end[pieces.begin].astype(np.int64),
                             layout.position_ids[pieces.begin].astype(np.int64), pieces.rank, own + 1))  # fmt: skip
        return _Blocks.together(found)

    def _wanted(self, batch: int, table: "_Blocks", rank: int, window: int, chunk: int) -> "_Blocks":
        """What a rank reads: keys by their numbers on the rank that has them, queries by theirs on the one that reads."""
        tokens = self.tokens(batch, rank)
        begin, end = (np.searchsorted(tokens, bound) for bound in (table.query_begin, table.query_end))
        kept = np.flatnonzero((begin < end) & ((table.owner != rank) | (table.source < table.num_sources - 1)))
        found = replace(table.at(kept), query_begin=begin[kept], query_end=end[kept])
        if window or chunk:
            found = found.within(self.layout(batch).position_ids[tokens].astype(np.int64), window, chunk)
        key_begin = np.empty_like(found.key_begin)
        ancestors = (*self.plan.context(batch).ancestors, batch)
        for source, owner in {(int(s), int(o)) for s, o in zip(found.source, found.owner)}:
            which = (found.source == source) & (found.owner == owner)
            key_begin[which] = np.searchsorted(self.tokens(ancestors[source], owner), found.key_begin[which])
        return replace(found, key_begin=key_begin, key_end=key_begin + found.key_end - found.key_begin)

    def _read(self, mine: "_Blocks", own: int) -> tuple[Integers, Integers]:
        """(blocks, positions): rows of frames where they are, and then what comes from others, by sender."""
        order = np.lexsort((mine.owner, mine.owner != self.rank))
        mine = mine.at(order)
        sizes = mine.key_end - mine.key_begin
        is_away = mine.owner != self.rank
        offset = np.cumsum(np.where(is_away, sizes, 0)) - sizes
        begin = np.where(is_away, offset, mine.key_begin)
        segment = np.where(is_away, own, mine.source)
        blocks = np.column_stack([segment, begin, begin + sizes, mine.query_begin, mine.query_end])
        return np.ascontiguousarray(blocks), np.ascontiguousarray(mine.position)


@dataclass(frozen=True)
class _Blocks:
    """Rows of keys [key_begin, key_end), tokens of a source, that queries [query_begin, query_end) see. All int64 [N].

    position  of the first key
    owner     the rank that has them
    """

    source: Integers
    key_begin: Integers
    key_end: Integers
    query_begin: Integers
    query_end: Integers
    position: Integers
    owner: Integers
    num_sources: int

    def arrays(self) -> list[Integers]:
        return [self.source, self.key_begin, self.key_end, self.query_begin, self.query_end, self.position, self.owner]

    def at(self, which: Integers) -> "_Blocks":
        return _Blocks.of([array[which] for array in self.arrays()], self.num_sources)

    @staticmethod
    def together(tables: "list[_Blocks]") -> "_Blocks":
        columns = zip(*(table.arrays() for table in tables))
        return _Blocks.of([np.concatenate(column) for column in columns], tables[-1].num_sources)

    @staticmethod
    def of(arrays: Sequence[Integers], num_sources: int) -> "_Blocks":
        source, key_begin, key_end, query_begin, query_end, position, owner = arrays
        return _Blocks(source, key_begin, key_end, query_begin, query_end, position, owner, num_sources)

    def within(self, positions: Integers, window: int, chunk: int) -> "_Blocks":
        """Without the keys that no query sees. positions: of the queries' tokens."""
        bounds = np.column_stack([self.query_begin, self.query_end]).reshape(-1)
        padded = np.append(positions, np.iinfo(np.int64).max)
        nearest = np.minimum.reduceat(padded, bounds)[::2] if len(bounds) else NOTHING
        first = nearest - window + 1 if window else nearest // chunk * chunk
        skipped = np.maximum(first - self.position, 0)
        found = replace(self, key_begin=self.key_begin + skipped, position=self.position + skipped)
        return found.at(np.flatnonzero(found.key_begin < found.key_end))


def _of_ancestor(pieces: Pieces, source: int, blocks: Integers, positions: Integers) -> _Blocks:
    """Blocks of keys of an ancestor, cut where its pieces end."""
    _, begin, end, query_begin, query_end = blocks.T
    first, last = pieces.of(begin), pieces.of(end - 1)
    which = np.repeat(np.arange(len(begin)), last - first + 1)
    piece = np.concatenate([NOTHING, *(np.arange(a, b + 1) for a, b in zip(first, last))])
    key_begin = np.maximum(begin[which], pieces.begin[piece])
    return _Blocks(np.full(len(which), source), key_begin, np.minimum(end[which], pieces.end[piece]), query_begin[which],
                   query_end[which], positions[which] + key_begin - begin[which], pieces.rank[piece], source + 1)  # fmt: skip
