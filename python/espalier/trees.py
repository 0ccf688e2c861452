# SPDX-License-Identifier: Apache-2.0
"""Prefix trees of token rows."""

from .native import core
from .sequences import listed, merge_keys_of, route_keys_of, token_sequences, tree_keys_of

Forest = core.Forest
Layout = core.Layout


def build(rows, *, tree_keys=None, merge_keys=None):
    """The prefix trees of token rows, in time linear in their tokens.

    rows        a list of R rows: lists of token ids, integer arrays [n], or dicts with `input_ids` (of which recorded
                `routed_experts` are respected: tokens with different routes are not shared). Or packed, as a tuple of two
                NumPy arrays: offsets int64 [R + 1] and tokens int32 [N], where row r is tokens[offsets[r]:offsets[r + 1]].
    tree_keys   [R] rows with different keys share nothing: names or numbers, such as group ids. Default: all may share.
    merge_keys  [N] integers, or a list of rows of them: tokens are shared only where these are equal, too.

    Returns a `Forest`; "trajectory" r of it is row r. Raises InputError, naming the row, for rows that are empty or padded and
    for ids that are negative or beyond 32 bits.

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
    if not isinstance(rows, tuple):
        rows = listed(rows)
        if merge_keys is None:
            merge_keys = route_keys_of(rows)
    offsets, tokens = token_sequences(rows)
    return core.build_forest(offsets, tokens, None if merge_keys is None else merge_keys_of(merge_keys, offsets),
                             None if tree_keys is None else tree_keys_of(tree_keys, len(offsets) - 1))  # fmt: skip
