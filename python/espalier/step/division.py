# SPDX-License-Identifier: Apache-2.0
"""The micro-batches of a plan, each divided over ranks: what a rank has of it, and which rows it exchanges with others.

All of it follows from the plan, so that every rank knows what the others will send and want."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..hf.exchange import Integers
from ..hf.part_run import Scan
from ..hf.run import Shard
from ..native import core
from ..pricing import costs
from .plan import StepPlan, Terms
from .schedule import Pieces, Schedule, left_of, places_in


def pair_cost(config: object, device: str) -> float:
    """What a visible pair of tokens costs in a model of Transformers, by its config, where a token costs 1. device: as
    torch.device.type has it."""
    try:
        return core.pair_cost(costs(config, device="cpu" if device == "cpu" else "cuda").found)
    except InputError:  # a family that only Transformers has
        return core.pair_cost(None)


class Division:
    """The micro-batches of a StepPlan over the ranks of a group.

    pair           what a visible pair costs, in tokens
    is_contiguous  whether each rank has one range of tokens of a micro-batch, as recurrences want it; else it has several
    """

    def __init__(self, plan: StepPlan, rank: int, ranks: int, pair: float, is_contiguous: bool) -> None:
        self.plan, self.rank, self.ranks = plan, rank, ranks
        self._pair, self._is_contiguous = pair, is_contiguous
        self._divided = plan.divide(ranks, pair, is_contiguous)
        self._pieces: dict[int, Pieces] = {}
        self.layout = lru_cache(8)(plan.layout)

    def digest(self) -> str:
        """What has to be the same on all ranks of the group, as text."""
        return f"{self.plan.digest()}, {'contiguous' if self._is_contiguous else 'balanced'}, {self._pair!r} for a pair"

    def imbalance(self) -> float:
        """How much longer the step takes than with equal costs of all ranks, as a part of it, by what tokens and pairs cost."""
        found = [self._divided.costs(batch) for batch in self.plan.running]
        mean = sum(of_ranks.mean() for of_ranks in found)
        return float(sum(of_ranks.max() for of_ranks in found) / mean - 1) if mean else 0.0

    def tokens(self, batch: int) -> Integers:
        """int64 ascending: those of this rank; none where it has a stand-in."""
        return self._divided.tokens(batch, self.rank)

    def shard(self, batch: int) -> Shard:
        layout, tokens = self.layout(batch), self.tokens(batch)
        longest = int(layout.position_ids.max(initial=-1)) + 1
        if len(tokens) == 0:
            none = np.full(1, -1, np.int32)
            return Shard(np.zeros(1, np.int64), layout.position_ids[:1], np.ones(1, np.int32), none, layout.input_ids[:1],
                         longest, True)  # fmt: skip
        ends = np.searchsorted(tokens, layout.subtree_end[tokens]).astype(np.int32)
        return Shard(tokens, layout.position_ids[tokens], ends, places_in(tokens, layout.prev[tokens]),
                     layout.input_ids[tokens], longest, False)  # fmt: skip

    def terms(self, batch: int) -> Terms[NDArray[Any]]:
        """Terms of the edges whose sources are tokens of this rank."""
        terms, tokens = self.plan.terms(batch, self.layout(batch)), self.tokens(batch)
        sources = terms.sources[terms.edge_row]
        is_ours = np.isin(sources, tokens)
        number = np.cumsum(is_ours) - 1
        mine = is_ours[terms.edges]
        places, edge_row = np.unique(np.searchsorted(tokens, sources[is_ours]), return_inverse=True)
        return replace(terms, rows=terms.rows[mine], positions=terms.positions[mine], weights=terms.weights[mine],
                       edges=number[terms.edges[mine]], sources=places, edge_row=edge_row.reshape(-1),
                       edge_target=terms.edge_target[is_ours])  # fmt: skip

    def keys(self, batch: int, window: int, chunk: int) -> core.KeyReads:
        """What attention reads with a sliding window or in chunks, as hf.asked_attention.Attention has them."""
        return self._divided.key_reads(batch, self.layout(batch), self.rank, window, chunk)

    def scan(self, batch: int) -> Scan:
        """How recurrences run."""
        shard, parent = self.shard(batch), self.plan.parent[batch]
        before = None if parent < 0 else left_of(self.pieces(parent), self.plan.ends(parent))
        schedule = Schedule(self.pieces(batch), self.plan.ends(batch), before, self.rank, self.ranks)
        if shard.is_stand_in:
            return schedule.scan(shard.tokens, np.full(1, -1))
        return schedule.scan(shard.tokens, self.plan.prev(batch, self.layout(batch))[shard.tokens].astype(np.int64))

    def pieces(self, batch: int) -> Pieces:
        if batch not in self._pieces:
            self._pieces[batch] = self._cut_runs(batch)
        return self._pieces[batch]

    def _cut_runs(self, batch: int) -> Pieces:
        layout, ranges = self.layout(batch), self._divided.ranges(batch)
        begin = np.unique(np.concatenate([layout.run_begin[:-1].astype(np.int64), ranges[:, 0]]))
        end = np.append(begin[1:], layout.num_tokens)
        rank = ranges[np.searchsorted(ranges[:, 0], begin, side="right") - 1, 2]
        return Pieces(begin, end, rank, self.plan.prev(batch, layout)[begin].astype(np.int64))
