# SPDX-License-Identifier: Apache-2.0
"""Prefix trees of token rows, and what of them runs together."""

import copyreg
import math
import os
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import InputError
from .native import core
from .pricing import Costs, costs_of
from .rows.loss_masks import flat_loss_mask
from .rows.sequences import Rows, is_packed, listed, merge_keys_of, route_keys_of, token_sequences, tree_keys_of

Distribution = core.Distribution
Forest = core.Forest
Layout = core.Layout
MicroBatch = core.MicroBatch
Plan = core.Plan
RankShare = core.RankShare


def build(rows: Rows | core.Trajectories, *, tree_keys: Iterable[Hashable] | None = None,
          merge_keys: Sequence[Any] | NDArray[np.integer[Any]] | None = None,
          most_leaves_first: bool = False) -> Forest:  # fmt: skip
    """The prefix trees of token rows, in time linear in their tokens.

    Args:
        rows: R rows: lists of token ids, integer arrays [n], or dicts with `input_ids` (of which `routed_experts` are
            respected: tokens with different recorded routes are not shared). Or packed, as a tuple of two NumPy arrays:
            offsets int64 [R + 1] and tokens int32 [N]; row r is tokens[offsets[r]:offsets[r + 1]]. Or Trajectories, as
            `espalier.read` gives them.
        tree_keys: [R]: rows with different keys share nothing. Names or numbers, such as group ids. Default: all may share.
        merge_keys: [N] integers, or R rows of them: tokens are shared only where these are equal, too.
        most_leaves_first: Whether the child with most leaves comes first among its siblings, so that each token sees few
            intervals of tokens (`Layout.visible_intervals`). Default: children are in the order of the rows.

    Returns:
        A Forest, whose trajectory r is row r.

    Raises:
        InputError: A row is empty or a padded array, or has ids that are negative or beyond 32 bits. The message names it.

    Examples:
        >>> import espalier
        >>> forest = espalier.build([[5, 6, 7, 8], [5, 6, 9], [5, 6, 9, 1]])
        >>> forest
        <espalier.Forest: 3 trajectories in 1 tree, 4 nodes; 11 flat / 6 tree tokens = 1.83x>
        >>> forest.tokens.tolist(), forest.parent.tolist(), forest.multiplicity.tolist()
        ([5, 6, 7, 8, 9, 1], [-1, 0, 0, 2], [3, 1, 2, 1])
        >>> layout = forest.layout()
        >>> layout.position_ids.tolist()
        [0, 1, 2, 3, 2, 3]
        >>> layout.input_ids[layout.path(1)].tolist()
        [5, 6, 9]
    """
    if isinstance(rows, core.Trajectories):
        return _build_trajectories(rows, tree_keys, merge_keys, most_leaves_first)
    if not is_packed(rows):
        rows = listed(rows)
        if merge_keys is None:
            merge_keys = route_keys_of(rows)
    return _build(*token_sequences(rows), tree_keys, merge_keys, most_leaves_first)


def _build_trajectories(rows: core.Trajectories, tree_keys: Iterable[Hashable] | None, merge_keys: Any,
                        most_leaves_first: bool) -> Forest:  # fmt: skip
    if merge_keys is None:
        keys = None if tree_keys is None else tree_keys_of(tree_keys, len(rows))
        return core.build_from_trajectories(rows, keys, most_leaves_first)
    if rows.routed_experts is not None:
        raise InputError("merge_keys: expected none beside rows with routed_experts, which are merge keys themselves")
    return _build(rows.offsets, rows.input_ids, tree_keys, merge_keys, most_leaves_first)


def _build(offsets: Any, tokens: Any, tree_keys: Iterable[Hashable] | None, merge_keys: Any,
           most_leaves_first: bool) -> Forest:  # fmt: skip
    return core.build_forest(offsets, tokens, None if merge_keys is None else merge_keys_of(merge_keys, offsets),
                             None if tree_keys is None else tree_keys_of(tree_keys, len(offsets) - 1),
                             most_leaves_first)  # fmt: skip


def plan(forest: Forest, *, token_budget: int, strategy: str = "auto", model: str | os.PathLike[str] | Costs | Any = None,
         loss_mask: Sequence[Any] | NDArray[Any] | None = None) -> Plan:  # fmt: skip
    """What of a forest runs together: micro-batches of at most `token_budget` tokens, in the order of forward passes.

    Equal forests give equal plans.

    Args:
        forest: As `build` makes it.
        token_budget: Tokens of one micro-batch at most.
        strategy: "partition" cuts trees anywhere and encodes every token once; micro-batches then read context of others.
            "tree-packing" repeats prefixes, "sequence-packing" shares nothing, "append-only" shares rows that others
            extend; their micro-batches are independent. "auto" takes the one of the first three that is predicted to be
            fastest, without a model for a decoder of common proportions.
        model: Whose FLOPs and seconds are predicted: a folder of Hugging Face, its config.json, a model of Transformers, or
            Costs, as `espalier.costs` makes them.
        loss_mask: Which tokens carry loss, for these predictions: as `espalier.Step` takes it. Default: all. The plan does
            not depend on it.

    Returns:
        A Plan, a sequence of MicroBatch.

    Raises:
        InputError: A trajectory is longer than the budget of a packing strategy; the message names the smallest budget that
            works. Or an argument or the model cannot be used.

    Examples:
        >>> import espalier
        >>> forest = espalier.build([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8], [1, 2, 3, 4, 9]])
        >>> plan = espalier.plan(forest, token_budget=6, strategy="partition")
        >>> plan
        <espalier.Plan: partition, 2 micro-batches, 9 encoded of 17 flat tokens>
        >>> [(batch.parent, batch.num_tokens, batch.context_tokens) for batch in plan]
        [(-1, 3, 0), (0, 6, 3)]
        >>> espalier.plan(forest, token_budget=6, strategy="tree-packing").num_tokens
        17
    """
    _check_forest(forest)
    mask = None if loss_mask is None else _mask_of(loss_mask, forest)
    return core.plan(forest, str(strategy), _whole("token_budget", token_budget), costs_of(model), mask)


def restored_plan(forest: Forest, state: dict[str, Any]) -> Plan:
    """What pickles of plans call: pickle finds functions of Python only."""
    return core.restored_plan(forest, state)


copyreg.pickle(Plan, lambda plan: (restored_plan, plan.__reduce__()[1]))


def distribute(forest: Forest, ranks: int, *, model: str | os.PathLike[str] | Costs | Any = None, context_parallel: int = 1,
               link_bandwidth: float = math.inf) -> Distribution:  # fmt: skip
    """Which trajectories of a forest each of `ranks` processes trains on, by predicted time.

    Whole trees go to ranks, longest first, and are moved and swapped until the slowest gets no faster. A tree that takes more
    than a rank's mean is split by its branches; the prefix that ranks then encode again counts. A rank without trajectories
    has to take part in reductions with gradients of zero. Equal forests and models give equal distributions, so every rank
    may compute it by itself.

    Args:
        forest: As `build` makes it.
        ranks: Their number, at least 1.
        model: By whose predicted seconds: as `plan` takes it. Default: a decoder of common proportions.
        context_parallel: How many of the ranks compute each tree together, each a part of it: a divisor of `ranks`, or 0 for the
            fastest one. Ranks of a group are taken to have equal parts.
        link_bandwidth: Gigabytes per second into a rank, and as many out of it, which such ranks have for keys and values in
            bfloat16.

    Returns:
        A Distribution, a sequence of RankShare: one for each rank, or for each group of ranks.

    Raises:
        InputError: An argument or the model cannot be used.

    Examples:
        >>> import espalier
        >>> forest = espalier.build([[1, 2, 3, 4], [1, 2, 5, 6], [7, 8, 9], [7, 8, 0], [9, 9]])
        >>> distribution = espalier.distribute(forest, 2)
        >>> [share.trajectories.tolist() for share in distribution], distribution.repeated_tokens
        ([[0, 1], [2, 3, 4]], 0)
    """
    _check_forest(forest)
    together = context_parallel if context_parallel == 0 else _whole("context_parallel", context_parallel)
    if not link_bandwidth > 0:
        raise InputError(f"link_bandwidth: expected a number above 0, received {link_bandwidth!r}")
    if together == 0 and math.isinf(link_bandwidth):
        raise InputError("context_parallel=0: expected a link_bandwidth, by which ranks are the fastest, received none")
    return core.distribute(forest, _whole("ranks", ranks), costs_of(model), together, 1e9 * link_bandwidth)


def _mask_of(loss_mask: Any, forest: Forest) -> NDArray[np.uint8]:
    sizes = forest.position[forest.end_node] + np.diff(forest.node_begin)[forest.end_node]
    weights = flat_loss_mask(loss_mask, np.concatenate([[0], np.cumsum(sizes)]))
    mask: NDArray[np.uint8] = np.not_equal(weights, 0).astype(np.uint8)
    return mask


def _check_forest(forest: object) -> None:
    if not isinstance(forest, Forest):
        raise InputError(f"forest: expected a Forest, as espalier.build makes it, received {type(forest).__name__}")


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < 1:
        raise InputError(f"{name}: expected a whole number above 0, received {value!r}")
    return int(value.__index__())
