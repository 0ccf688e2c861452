# SPDX-License-Identifier: Apache-2.0
"""What a layer asks of attention on a forest, and attention in chunks of positions."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .run import TreeRun


class Attention(NamedTuple):
    """One call of attention: token j attends to its ancestor i and to itself, with these limits.

    query  [1, H, T, D]
    key    [1, K, T, D]
    value  [1, K, T, E]
    scale  of the logits
    window tokens see ancestors less than so many positions away; 0: no limit
    chunk  tokens see ancestors with the same position // chunk; 0: no limit
    softcap logits z are softcap * tanh(z / softcap); 0: as they are
    sinks  [H]: logits that take part in the denominator alone, or None
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    def visible(self, run: "TreeRun") -> Callable[[Tensor, Tensor], Tensor]:
        """The mask as a function of query and key numbers, tensors that broadcast."""
        ends, position = run.subtree_end, run.position

        def visible(query: Tensor, key: Tensor) -> Tensor:
            seen = (key <= query) & (query < ends[key])
            if self.window:
                seen = seen & (position[query] - position[key] < self.window)
            if self.chunk:
                seen = seen & (position[query] // self.chunk == position[key] // self.chunk)
            return seen

        return visible


class Chunks:
    """The tokens of a forest in the order of their chunks, each of which is a separate forest: what a chunk leaves of a subtree
    is one run of tokens, and attention in chunks is attention on the forest of all of them.

    order       [T] int64: the token at each place
    rank        [T] int64: the place of each token
    subtree_end [T] int32: of the forest in the new order"""

    def __init__(self, subtree_end: Tensor, position: Tensor, size: int) -> None:
        self.size, self._count = size, len(position)
        number = torch.arange(self._count, device=position.device)
        chunk = position.long() // size
        # Sorted by chunk, then by token; so the tokens of a chunk before any number are found by bisection.
        self._keys, self.order = torch.sort(chunk * (self._count + 1) + number)
        self.rank = torch.empty_like(self.order).scatter_(0, self.order, number)
        ends = chunk * (self._count + 1) + subtree_end.long()
        self.subtree_end = torch.searchsorted(self._keys, ends)[self.order].int()

    def context(self, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments of ops.tree_attention for keys of ancestors, which are blocks of keys of ascending positions, for queries in
        the new order: each block is cut where a chunk of keys ends, and is seen by the queries of that chunk."""
        if not given:
            return given
        keys, blocks, positions = self._keys.cpu(), [], []
        rows = zip(given["context_blocks"].tolist(), given["context_positions"].tolist())
        for (segment, key_begin, key_end, query_begin, query_end), first in rows:
            for chunk in range(first // self.size, (first + key_end - key_begin - 1) // self.size + 1):
                seen = torch.tensor([query_begin, query_end], device="cpu") + chunk * (self._count + 1)
                begin, end = torch.searchsorted(keys, seen).tolist()
                from_key = max(chunk * self.size - first, 0) + key_begin
                to_key = min((chunk + 1) * self.size - first + key_begin, key_end)
                if begin < end:
                    blocks.append([segment, from_key, to_key, begin, end])
                    positions.append(from_key - key_begin + first)
        return given | {"context_blocks": torch.tensor(blocks, dtype=torch.int64, device="cpu").reshape(-1, 5),
                        "context_positions": torch.tensor(positions, dtype=torch.int64, device="cpu")}  # fmt: skip


def in_groups(tensor: Tensor, groups: int, dim: int) -> Sequence[Tensor]:
    """Equal parts of its heads; one group leaves no trace in the graph."""
    return (tensor,) if groups == 1 else tensor.chunk(groups, dim)
