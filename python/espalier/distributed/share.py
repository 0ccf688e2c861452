# SPDX-License-Identifier: Apache-2.0
"""What of a step's rows one rank trains on."""

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..trees import Distribution, Forest, build, distribute


@dataclass(frozen=True)
class Share:
    """One rank's part of a step, as `Ranks.share` makes it.

    Attributes:
        rank: Whose part it is.
        rows: List of its rows, as they were given; empty where there is no work for it.
        trajectories: int64: their numbers among the rows of the step, ascending.
        forest: The Forest of `rows`, for `espalier.plan`.
        whole: The Forest of the rows of the step.
        distribution: What every rank has.

    Examples:
        >>> share = ranks.share([[11, 12, 13, 14], [11, 12, 13, 15]])
        >>> share.rank, share.trajectories.tolist(), share.encoded_tokens
        (0, [0, 1], 5)
    """

    rank: int
    rows: list[Any]
    trajectories: NDArray[np.int64]
    forest: Forest
    whole: Forest
    distribution: Distribution

    @property
    def encoded_tokens(self) -> int:
        """Tokens that all ranks together encode: the tree's, and prefixes of trees that are on several ranks."""
        return self.whole.tree_tokens + self.distribution.repeated_tokens

    def digest(self) -> str:
        """A number, as text, that tells distributions of rows apart.

        Returns:
            16 hexadecimal digits.

        Examples:
            >>> len(ranks.share([[11, 12, 13]]).digest())
            16
        """
        digest = hashlib.blake2b(digest_size=8)
        for array in (self.whole.tokens, self.whole.parent, self.whole.node_begin, self.whole.end_node):
            digest.update(np.ascontiguousarray(array).tobytes())
        for rank in range(len(self.distribution)):
            share = self.distribution[rank]
            digest.update(f"{len(share.trajectories)};".encode() + share.trajectories.tobytes())
        return digest.hexdigest()


def share_of(rows: Any, rank: int, ranks: int, tree_keys: Sequence[Hashable] | None = None, model: Any = None) -> Share:
    """The Share of one of `ranks` ranks. rows: a list or Trajectories, as espalier.build takes them, and so tree_keys;
    model: as espalier.distribute takes it. Raises InputError as these do."""
    if isinstance(rows, tuple):
        raise InputError("rows: expected a list of rows, or Trajectories, received packed arrays; give a list of "
                         "slices")  # fmt: skip
    whole = build(rows, tree_keys=tree_keys)
    distribution = distribute(whole, ranks, model=model)
    trajectories = distribution[rank].trajectories
    own = [rows[int(number)] for number in trajectories]
    keys = None if tree_keys is None else [tree_keys[int(number)] for number in trajectories]
    return Share(rank, own, trajectories, build(own, tree_keys=keys), whole, distribution)
