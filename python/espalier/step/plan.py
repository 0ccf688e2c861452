# SPDX-License-Identifier: Apache-2.0
"""What each micro-batch of a plan reads of others, leaves to others and predicts, as NumPy arrays."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..hf.context import ContextReads
from ..hf.routes import of_forest
from ..native import core
from ..rows.loss_masks import term_weights
from ..trees import Layout, Plan

Integers = NDArray[np.int64]
Values = TypeVar("Values")


@dataclass(frozen=True)
class Terms(Generic[Values]):
    """The M terms of one micro-batch, by trajectory and then by position, and the E different edges that they read.
    int64, but for weights; arrays, or tensors on the device of the model."""

    rows: Values  # [M] the trajectory
    positions: Values  # [M] of the predicted token in it
    weights: Values  # [M] float64: by loss_mask
    edges: Values  # [M] the edge that a term reads
    sources: Values  # [S] ascending: the tokens of the layout that predict
    edge_row: Values  # [E] ascending: which of the sources predicts
    edge_target: Values  # [E] the id that is predicted


class StepPlan:
    """The micro-batches of a plan that have terms, or descendants with terms; others need not run.

    plan       an espalier.Plan of R rows
    loss_mask  which tokens are terms, and their weights: R rows of one number >= 0 for each token, or all of them in one
               array [N], 0 for no loss. None: all tokens, with weight 1. A row's first token, which nothing predicts,
               never is a term.

    running       the micro-batches that run, in the order of the plan
    last          the one of them that runs backward last
    parent        [B] of each micro-batch, -1 for none
    num_terms     [B] of each micro-batch
    total_weight  of all terms
    is_weighted   whether weights other than 0 and 1 are among them
    offsets       [R + 1] int64 of the rows
    weights       [N] float64 of all tokens of the rows, 0 for no term

    Raises InputError for masks that do not fit."""

    def __init__(self, plan: Plan, loss_mask: Any = None) -> None:
        self._plan, self._batches = plan, list(plan)
        self.parent = [batch.parent for batch in self._batches]
        parts = [_Parts(batch.layout()) for batch in self._batches]
        self.offsets = _row_offsets(parts)
        self.weights = term_weights(loss_mask, self.offsets)
        self._is_term = self.weights != 0
        self.total_weight = float(self.weights.sum())
        self.is_weighted = bool((self.weights[self._is_term] != 1).any())
        self._set_beginnings(parts)
        self.num_terms = self._counted(parts)
        self._set_running()
        self._set_cuts(parts)

    def __len__(self) -> int:
        return len(self._batches)

    def digest(self) -> str:
        """Text that tells plans, their tokens and the weights of their terms apart."""
        digest = hashlib.blake2b(f"{self.parent}".encode(), digest_size=8)
        digest.update(self.weights.tobytes())
        for batch in self.running:
            digest.update(f"{batch} {self.num_terms[batch]}".encode() + self.layout(batch).input_ids.tobytes())
        return digest.hexdigest()

    def layout(self, batch: int) -> Layout:
        return self._batches[batch].layout()

    def divide(self, ranks: int, pair_cost: float, is_contiguous: bool) -> core.DividedPlan:
        """The micro-batches over ranks, as core.divide has it."""
        return core.divide(self._plan, ranks, pair_cost, is_contiguous)

    def children(self, batch: int) -> list[int]:
        """Those that run and continue runs of `batch`."""
        return self._children[batch]

    def ends(self, batch: int) -> Integers:
        """int64 [C]: the tokens of the layout after which others continue, ascending."""
        return self._ends[batch]

    def prev(self, batch: int, layout: Layout) -> NDArray[np.int32]:
        """int32 [T], as of the recurrences in espalier.ops: -2 - n where a token continues the parent's ends[n]."""
        prev = layout.prev.copy()
        parent = self.parent[batch]
        if parent >= 0:
            roots = layout.run_begin[:-1][layout.run_parent < 0]
            prev[roots] = -2 - np.searchsorted(self._cuts[parent], self._batches[batch].context_runs)
        return prev

    def places(self, layout: Layout) -> tuple[Integers, Integers]:
        """(tokens [P], places [P]): tokens of the layout of a micro-batch, once for each row that passes through, and
        where they stand in the rows."""
        _, tokens, rows, positions = _passages(layout)
        return tokens, self.offsets[rows] + positions

    def routes(self, recorded: Tensor, layout: Layout) -> Tensor:
        """[R, T, K] int64 for the tokens of the layout of a micro-batch, of the routes of all rows, as hf.routes.routes_of_rows
        gives them. Raises Unsupported where tokens that rows share have different ones."""
        tokens, places = self.places(layout)
        return of_forest(recorded[torch.from_numpy(places)], tokens, layout.num_tokens).long()

    def context(self, batch: int) -> ContextReads:
        """ContextReads of a micro-batch."""
        blocks = np.asarray(self._batches[batch].context)
        ancestors, segments = np.unique(blocks[:, 0], return_inverse=True)
        return ContextReads(tuple(ancestors.tolist()), np.column_stack([segments.reshape(-1), blocks[:, 1:5]]),
                            np.ascontiguousarray(blocks[:, 5]))  # fmt: skip

    def terms(self, batch: int, layout: Layout) -> Terms[NDArray[Any]]:
        """Terms of a micro-batch. An edge to a token of another one is its source's."""
        starts, tokens, rows, positions = _passages(layout)
        positions = positions + 1  # of the predicted token
        places = self.offsets[rows] + positions
        chosen = (places < self.offsets[rows + 1]) & self._is_term[np.minimum(places, len(self._is_term) - 1)]
        targets = np.empty(len(tokens), np.int64)
        targets[:-1] = layout.input_ids[tokens[1:]]
        last = starts[1:] - 1
        found = np.searchsorted(self._beginnings, places[last])  # any where no part begins
        targets[last] = self._beginning_tokens[np.minimum(found, len(self._beginnings) - 1)]
        edges = tokens[chosen] << 32 | targets[chosen]
        different, which = np.unique(edges, return_inverse=True)
        sources, edge_row = np.unique(different >> 32, return_inverse=True)
        return Terms(rows[chosen], positions[chosen], self.weights[places[chosen]], which.reshape(-1), sources,
                     edge_row.reshape(-1), different & 0xFFFFFFFF)  # fmt: skip

    def _set_beginnings(self, parts: "Sequence[_Parts]") -> None:
        """Where in the rows parts begin, ascending, and with which token."""
        places = np.concatenate([self.offsets[part.rows] + part.first for part in parts] or [np.zeros(0, np.int64)])
        tokens = np.concatenate([part.first_token for part in parts] or [np.zeros(0, np.int64)])
        order = np.argsort(places, kind="stable")
        self._beginnings, self._beginning_tokens = places[order], tokens[order]

    def _counted(self, parts: "Sequence[_Parts]") -> list[int]:
        before = np.concatenate([[0], np.cumsum(self._is_term)])
        ends = [np.minimum(self.offsets[part.rows] + part.last + 2, self.offsets[part.rows + 1]) for part in parts]
        return [int((before[end] - before[self.offsets[part.rows] + part.first + 1]).sum())
                for part, end in zip(parts, ends)]  # fmt: skip

    def _set_running(self) -> None:
        has_terms = [count > 0 for count in self.num_terms]
        for batch in reversed(range(len(self))):
            if has_terms[batch] and self.parent[batch] >= 0:
                has_terms[self.parent[batch]] = True
        self.running = [batch for batch in range(len(self)) if has_terms[batch]]
        self.last = max((batch for batch in self.running if self.parent[batch] < 0), default=None)
        self._children: list[list[int]] = [[] for _ in self._batches]
        for batch in self.running:
            if self.parent[batch] >= 0:
                self._children[self.parent[batch]].append(batch)

    def _set_cuts(self, parts: "Sequence[_Parts]") -> None:
        nothing = [np.zeros(0, np.int64)]
        self._cuts = [np.unique(np.concatenate([self._batches[child].context_runs for child in children] or nothing))
                      for children in self._children]  # fmt: skip
        self._ends: list[Integers] = [part.run_end[cuts] - 1 for part, cuts in zip(parts, self._cuts)]


class _Parts:
    """The parts of trajectories that lie in one micro-batch."""

    def __init__(self, layout: Layout) -> None:
        starts, tokens = layout.paths()
        first = tokens[starts[:-1]]
        self.rows = layout.trajectories.copy()
        self.first = layout.position_ids[first].astype(np.int64)  # positions in the row
        self.last = layout.position_ids[tokens[starts[1:] - 1]].astype(np.int64)
        self.first_token = layout.input_ids[first].astype(np.int64)
        self.run_end = layout.run_begin[1:].copy()


def _passages(layout: Layout) -> tuple[Integers, Integers, Integers, Integers]:
    """Of the tokens on the paths of a layout: where each path starts among them, and token, row and position [P] int64."""
    starts, tokens = layout.paths()
    rows = np.repeat(layout.trajectories, np.diff(starts))
    return starts, tokens, rows, layout.position_ids[tokens].astype(np.int64)


def _row_offsets(parts: Sequence[_Parts]) -> Integers:
    rows = max((int(part.rows.max()) + 1 for part in parts if len(part.rows)), default=0)
    lengths = np.zeros(rows, np.int64)
    for part in parts:
        np.maximum.at(lengths, part.rows, part.last + 1)
    return np.concatenate([[0], np.cumsum(lengths)])
