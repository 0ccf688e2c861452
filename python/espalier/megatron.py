# SPDX-License-Identifier: Apache-2.0
"""Micro-batches for Megatron: the fields of `TreePackedSeqParams`, and how rows and their tokens map onto one another.

Megatron-LM's pull request 7387 (open, design in issue 7386) adds this class to `megatron/core/packed_seq_params.py`. Fields and
their meaning are those of arnavkomaragiri/Megatron-LM at 25cdfee8c95cfaa7fc40325a6458b8b3350d78af, the fork of its author.
"""

import dataclasses
import importlib
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .errors import InputError
from .packed_rows import Integers, PackedTensors, Padding, RowTokens, check_plan, is_whole, row_weights
from .trees import Layout, Plan

__all__ = ["PackedTrees", "pack"]

_HOME = "megatron.core.packed_seq_params"
_COMMIT = "25cdfee8c95c"


class QueryRun(NamedTuple):
    """Consecutive tokens of one segment in one shard: the fields of Megatron's `TreeQueryRun`."""

    segment_index: int
    global_start: int  # the packed tokens are [global_start, global_end)
    global_end: int
    local_indices: torch.Tensor  # int64: where they are in the shard


@dataclass(frozen=True, kw_only=True)
class PackedTrees(PackedTensors):
    """One micro-batch as a shard of T packed tokens: its trees one after another in preorder, each padded at its end.

    R rows with N tokens are in it. The shard has L of the T tokens, all of them without context parallelism. Tokens of the shard
    predict E terms of the rows, in the order of rows and positions. Tensors are int64 where nothing else is said.

    Attributes:
        arguments: The fields of `TreePackedSeqParams` for the shard, by name; others keep their defaults. Cumulative lengths, one
            for each tree, are int32. `tree_query_runs` has objects with the fields of `TreeQueryRun`.
        input_ids: [L], 0 for padding.
        subtree_end: [T]: packed token j sees packed token i if i <= j < subtree_end[i]. Padding is a tree of its own.
        shard: [L]: the packed tokens of the shard, ascending.
        rows: [R]: which rows of the forest are in the micro-batch, ascending.
        row_offsets: [R + 1]: row rows[k] consists of the packed tokens row_tokens[row_offsets[k]:row_offsets[k + 1]].
        row_tokens: [N]: the packed token of each token of the rows.
        places: [T]: a place in `row_tokens` that has the packed token, the first one; -1 for padding.
        targets: [E]: the ids that are to be predicted.
        weights: float32 [E], by the loss mask.

    Examples:
        >>> import espalier
        >>> plan = espalier.plan(espalier.build([[1, 2, 3, 4], [1, 2, 5]]), token_budget=8, strategy="tree-packing")
        >>> (packed,) = espalier.megatron.pack(plan)
        >>> packed.input_ids.tolist(), packed.position_ids.tolist()
        ([1, 2, 3, 4, 5], [0, 1, 2, 3, 2])
        >>> [packed.arguments[f"tree_segment_{name}"] for name in ("starts", "lengths", "parents", "depths")]
        [(0, 2, 4), (2, 2, 1), (-1, 0, 0), (0, 2, 2)]
    """

    arguments: dict[str, Any]
    input_ids: torch.Tensor
    shard: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor

    @property
    def position_ids(self) -> torch.Tensor:
        """int64 [L]: positions on the root path, 0 for padding. They are `tree_local_position_ids` as well."""
        positions: torch.Tensor = self.arguments["tree_local_position_ids"]
        return positions

    def params(self) -> Any:
        """Megatron's `TreePackedSeqParams` of `arguments`, which models take as `packed_seq_params`.

        Returns:
            An object of `megatron.core.packed_seq_params.TreePackedSeqParams`.

        Raises:
            ImportError: Megatron-LM is not installed, or has no such class, or one with other fields.

        Examples:
            >>> logits = model(ids[None], positions[None], None, packed_seq_params=packed.params())   # doctest: +SKIP
        """
        try:
            home = importlib.import_module(_HOME)
            params, run = home.TreePackedSeqParams, home.TreeQueryRun
        except (ImportError, AttributeError) as error:
            raise ImportError(f"{_HOME}: expected TreePackedSeqParams and TreeQueryRun of Megatron-LM's pull request 7387, "
                              f"received {error}; `arguments` has the fields without Megatron") from error  # fmt: skip
        unknown = self.arguments.keys() - {field.name for field in dataclasses.fields(params)}
        if unknown:
            raise ImportError(f"{_HOME}.TreePackedSeqParams: expected the fields of commit {_COMMIT}, received none named "
                              f"{', '.join(sorted(unknown))}")  # fmt: skip
        runs = tuple(run(**each._asdict()) for each in self.arguments["tree_query_runs"])
        return params(**{**self.arguments, "tree_query_runs": runs})

    def to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Values of terms, such as log-probabilities of the targets, where the rows have them.

        Args:
            values: [E] of any dtype.

        Returns:
            [R, W], W the tokens of the longest row less one: [k, t - 1] is the value of token t of row `rows[k]`, 0 where that is
            no term, or one of another shard. The sum over all shards has every term.

        Examples:
            >>> import espalier
            >>> plan = espalier.plan(espalier.build([[1, 2, 3, 4], [1, 2, 5]]), token_budget=8, strategy="tree-packing")
            >>> (packed,) = espalier.megatron.pack(plan)
            >>> packed.to_rows(packed.targets).tolist()
            [[2, 3, 4], [2, 5, 0]]
        """
        width: int = self.arguments["tree_edge_padded_width"]
        cells = values.new_zeros(len(self.rows) * width)
        return cells.index_copy(0, self.arguments["tree_edge_output_indices"], values).view(len(self.rows), width)


def pack(plan: Plan, *, loss_mask: Any = None, pad_to_multiple_of: int | None = None, context_parallel: int = 1,
         context_rank: int = 0) -> list[PackedTrees]:  # fmt: skip
    """The micro-batches of a plan as Megatron-LM's pull request 7387 takes them (`TreePackedSeqParams`).

    The model takes `input_ids`, `position_ids` and `params()`, and gives logits [E, vocabulary] of the terms alone. A term is a
    token of a row that carries loss, so a token that several rows share is a term of each. The sum of `weights` times losses over
    all micro-batches, and its gradients, are those of the rows.

    Args:
        plan: With strategy "tree-packing", "append-only" or "sequence-packing": each micro-batch has whole rows.
        loss_mask: Which tokens are terms, and their weights, as `espalier.Step` takes it: for all rows of the forest one number
            >= 0 for each token, 0 for no loss. Default: all tokens. A row's first token is never a term.
        pad_to_multiple_of: Each tree is padded to a multiple of it, on top of the plan's budget. With Megatron's sequence
            parallelism it has to be one of the ranks of tensor parallelism. Default: 2 * context_parallel, or 1 without
            context parallelism.
        context_parallel: Megatron's context_parallel_size. Each tree is cut into twice as many chunks, of which rank r has the
            ones that are number r from the beginning and from the end, as Megatron divides packed sequences.
        context_rank: Whose shard is returned: 0 to context_parallel - 1.

    Returns:
        One PackedTrees for each micro-batch, on the CPU.

    Raises:
        InputError: The plan is one of partition, whose micro-batches read context, or another argument cannot be used.

    Examples:
        >>> import espalier
        >>> plan = espalier.plan(espalier.build([[1, 2, 3, 4], [1, 2, 5]]), token_budget=8, strategy="tree-packing")
        >>> (packed,) = espalier.megatron.pack(plan, loss_mask=[[0, 0, 1, 1], [0, 0, 1]], context_parallel=2, context_rank=1)
        >>> packed.shard.tolist(), packed.arguments["cu_seqlens_q"].tolist()
        ([2, 3, 4, 5], [0, 8])
        >>> packed.targets.tolist(), packed.to_rows(packed.targets).tolist()
        ([4], [[0, 0, 4], [0, 0, 0]])
    """
    check_plan(plan)
    _check_ranks(context_parallel, context_rank)
    least = 1 if context_parallel == 1 else 2 * context_parallel
    multiple = least if pad_to_multiple_of is None else pad_to_multiple_of
    if not is_whole(multiple) or multiple < 1 or multiple % least:
        raise InputError(f"pad_to_multiple_of: expected a multiple of {least} with context_parallel={context_parallel}, received "
                         f"{multiple!r}")  # fmt: skip
    layouts = [batch.layout() for batch in plan]
    weights = row_weights(loss_mask, layouts)
    return [_pack_layout(layout, weights, multiple, context_parallel, context_rank) for layout in layouts]


def _check_ranks(ranks: int, rank: int) -> None:
    if not is_whole(ranks) or ranks < 1:
        raise InputError(f"context_parallel: expected a whole number above 0, received {ranks!r}")
    if not is_whole(rank) or not 0 <= rank < ranks:
        raise InputError(f"context_rank: expected a rank from 0 to {ranks - 1}, received {rank!r}")


def _pack_layout(layout: Layout, weights: list[NDArray[Any]], multiple: int, ranks: int, rank: int) -> PackedTrees:
    padding = Padding.of(np.append(np.flatnonzero(layout.prev == -1), layout.num_tokens), multiple)
    positions, ids = (padding.spread(values, 0) for values in (layout.position_ids, layout.input_ids))
    subtree_end = padding.subtree_end(layout)
    for begin, end in padding.pads:
        subtree_end[begin:end] = end
    rows = RowTokens.of(layout, padding)
    shards = _shards(padding.ends, ranks)
    in_shard = np.full(padding.ends[-1], -1)
    in_shard[shards[rank]] = np.arange(len(shards[rank]))
    terms = _Terms.of(rows.offsets, rows.tokens, [weights[row] for row in layout.trajectories], in_shard)
    segments = _segments(layout, padding)
    lengths = torch.tensor(padding.ends, dtype=torch.int32)
    longest = int(positions.max()) + 1
    return PackedTrees(
        arguments={
            "qkv_format": "thd",
            **{f"cu_seqlens_{name}": lengths for name in ("q", "kv", "q_padded", "kv_padded")},
            "max_seqlen_q": longest,
            "max_seqlen_kv": longest,
            **{f"tree_segment_{name}": tuple(values.tolist()) for name, values in segments._asdict().items()},
            "tree_local_position_ids": torch.tensor(positions[shards[rank]]),
            "tree_cp_gather_inverse": torch.tensor(np.argsort(np.concatenate(shards))),
            "tree_query_runs": _query_runs(segments, shards[rank]),
            "tree_cp_local_token_count": len(shards[rank]),
            **terms.arguments(),
        },
        input_ids=torch.tensor(ids[shards[rank]]), subtree_end=torch.tensor(subtree_end), shard=torch.tensor(shards[rank]),
        rows=torch.tensor(rows.rows), row_offsets=torch.tensor(rows.offsets), row_tokens=torch.tensor(rows.tokens),
        places=torch.tensor(rows.places), targets=torch.tensor(ids[rows.tokens[terms.places]]),
        weights=torch.tensor(terms.weights, dtype=torch.float32))  # fmt: skip


class _Segments(NamedTuple):
    """Maximal unbranched runs of packed tokens, and padding, ascending. Int64 [segments] each."""

    starts: Integers
    lengths: Integers
    parents: Integers  # the segment before it on the path, -1 at a root
    depths: Integers  # the position of its first token


def _segments(layout: Layout, padding: Padding) -> _Segments:
    prev, tokens = layout.prev, np.arange(layout.num_tokens)
    children = np.bincount(prev[prev >= 0], minlength=layout.num_tokens)
    begins = np.flatnonzero((prev == -1) | (prev != tokens - 1) | (children[prev] > 1))
    before = prev[begins]
    parents = np.where(before < 0, -1, np.searchsorted(begins, before, side="right") - 1)
    pads = padding.pads[padding.pads[:, 0] < padding.pads[:, 1]]
    starts = np.concatenate([padding.places[begins], pads[:, 0]])
    lengths = np.concatenate([np.diff(np.append(begins, layout.num_tokens)), pads[:, 1] - pads[:, 0]])
    order = np.argsort(starts)
    numbers = np.argsort(order)  # of each segment in this order
    parents = np.concatenate([np.where(parents < 0, -1, numbers[parents]), np.full(len(pads), -1)])
    depths = np.concatenate([layout.position_ids[begins], np.zeros(len(pads))]).astype(np.int64)
    return _Segments(starts[order], lengths[order], parents[order], depths[order])


def _shards(ends: Integers, ranks: int) -> list[Integers]:
    """The packed tokens of each rank, ascending: of 2 * ranks chunks of a tree, rank r has numbers r and 2 * ranks - 1 - r."""
    if ranks == 1:
        return [np.arange(ends[-1])]
    lengths = np.diff(ends)
    chunk = (np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)) // np.repeat(lengths // (2 * ranks), lengths)
    rank_of = np.minimum(chunk, 2 * ranks - 1 - chunk)
    return [np.flatnonzero(rank_of == rank) for rank in range(ranks)]


def _query_runs(segments: _Segments, shard: Integers) -> tuple[QueryRun, ...]:
    segment = np.searchsorted(segments.starts, shard, side="right") - 1
    breaks = np.flatnonzero((np.diff(shard) != 1) | (np.diff(segment) != 0)) + 1
    bounds = [0, *breaks.tolist(), len(shard)]
    return tuple(QueryRun(int(segment[begin]), int(shard[begin]), int(shard[end - 1]) + 1, torch.arange(begin, end))
                 for begin, end in itertools.pairwise(bounds))  # fmt: skip


class _Terms(NamedTuple):
    """The E terms that tokens of a shard predict, of all that a micro-batch has."""

    places: Integers  # [E]: where the rows have the tokens that are predicted
    sources: Integers  # [E]: the tokens of the shard that predict
    cells: Integers  # [E]: where rows padded to the same width have them, without first tokens
    weights: NDArray[np.float64]  # [E]
    total: int  # in all shards
    width: int  # of rows without first tokens

    @classmethod
    def of(cls, offsets: Integers, row_tokens: Integers, weights: list[NDArray[Any]], in_shard: Integers) -> "_Terms":
        lengths = np.diff(offsets)
        width = int(lengths.max()) - 1
        flat = np.concatenate(weights)
        places = np.flatnonzero(flat)
        total = len(places)
        sources = in_shard[row_tokens[places - 1]]
        places, sources = places[sources >= 0], sources[sources >= 0]
        row = np.searchsorted(offsets, places, side="right") - 1
        return cls(places, sources, row * width + places - offsets[row] - 1, flat[places], total, width)

    def arguments(self) -> dict[str, Any]:
        """Fields of edges. Where the shard predicts nothing, one source stays, of which Megatron makes a row of zeros."""
        return {
            "tree_edge_local_indices": torch.tensor(self.sources if len(self.sources) else [0], dtype=torch.int64),
            "tree_edge_output_indices": torch.tensor(self.cells, dtype=torch.int64),
            "tree_edge_count": self.total,
            "tree_edge_padded_width": self.width,
        }
