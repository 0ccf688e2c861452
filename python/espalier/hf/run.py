# SPDX-License-Identifier: Apache-2.0
"""A forest on its way through a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..trees import Layout
from .asked_attention import Chunks
from .mixers import COUNTED, Recurrence


Contexts: TypeAlias = Sequence[Callable[[], dict[str, Any]]]


@dataclass(frozen=True)
class Shard:
    """What one rank has of the tokens of a micro-batch, T of them, as a forest. A rank without any has a stand-in:
    a copy of the first token that sees nothing, and that nobody sees.

    tokens       [T] int64 ascending: their numbers in the micro-batch
    position_ids [T] int32
    subtree_end  [T] int32: among the tokens of the shard
    prev         [T] int32: likewise, -1 where the token before is elsewhere or nowhere
    input_ids    [T]
    longest      positions of the deepest token of the whole micro-batch and all before it
    is_stand_in  whether it is one
    """

    tokens: NDArray[np.int64]
    position_ids: NDArray[np.int32]
    subtree_end: NDArray[np.int32]
    prev: NDArray[np.int32]
    input_ids: NDArray[np.int32]
    longest: int
    is_stand_in: bool

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


class TreeRun:
    """What attention functions and recurrent mixers are handed as the keyword argument `espalier_tree`. Layers hand it
    on, and checkpointing keeps it, so recomputation in backward finds the same one.

    subtree_end, position  [T] int32 on the device of the model
    prev                   [T] int32 on the CPU, by which recurrences walk
    longest                positions of the deepest token and all before it
    routes                 [R, T, K] int64 on the device of the model: what its R routers replay; None: they choose
    replayed               the numbers of the routers that did so
    masks                  what backends make of it, kept for the other layers
    attended               ids of the modules whose attention has followed the forest
    compiled_calls         int64 on the CPU: how many calls of attention in compiled layers have done so
    calls                  by function of mixers.COUNTED, int64 on the CPU: how many recurrent mixers have handed it on.
                           Tensors, which compiled layers count in as well
    """

    def __init__(self, layout: Layout | Shard, device: torch.device, backend: str) -> None:
        self.backend = backend
        self.num_tokens = layout.num_tokens
        self.subtree_end = torch.tensor(layout.subtree_end, device=device)
        self.position = torch.tensor(layout.position_ids, device=device)
        self.longest = int(layout.position_ids.max(initial=-1)) + 1
        self.prev = torch.tensor(layout.prev, device="cpu")
        self.routes: Tensor | None = None
        self.replayed: set[int] = set()
        self.masks: dict[tuple[str, int, int], Any] = {}
        self._chunks: dict[int, Chunks] = {}
        self.attended: set[int] = set()
        self.compiled_calls = torch.zeros((), dtype=torch.int64, device="cpu")
        self.calls = {name: torch.zeros((), dtype=torch.int64, device="cpu") for name in COUNTED}

    # A whole forest has no context; context.py has runs that do.
    ends: Tensor | None = None  # tokens after which others continue

    @property
    def turn(self) -> Tensor | None:
        """What to run backward with a gradient of zero, so that all ranks run the exchanges of a micro-batch (part_run.py)."""
        return None

    def in_chunks(self, size: int) -> Chunks:
        """The tokens in the order of chunks of so many positions."""
        if size not in self._chunks:
            self._chunks[size] = Chunks(self.subtree_end, self.position, size)
        return self._chunks[size]

    def at(self, _layer: int) -> "TreeRun":
        """The run as one layer sees it."""
        return self

    def attention_contexts(self, _key: Tensor, _value: Tensor, _window: int, _chunk: int) -> Contexts:
        """Arguments of ops.tree_attention for keys and values of ancestors that are elsewhere. key [T, K, D] and value
        [T, K, E]: of the layer; window and chunk: as of asked_attention.Attention. The K heads are divided into so many equal
        groups; each function waits for the keys of its group, and is called in turn, so that attention of one runs
        while the next ones are on their way."""
        return [dict]

    def count_attention(self, module: Any) -> None:
        """Call for each call of attention, with the module whose attention it is."""
        if torch.compiler.is_compiling():
            self.compiled_calls.add_(1)
        else:
            self.attended.add(id(module))

    def along_paths(self, name: str, recurrence: Recurrence) -> Tensor:
        """What it gives for all tokens [T, ...]; end states are left and inherited under the name."""
        out, ends = recurrence.call(None, self.prev, self.inherited(name), self.ends)
        if ends is not None:
            self.leave(**{name: ends})
        return out

    def inherited(self, _name: str) -> Tensor | None:
        """What the parent's layer has left at its ends under a name; None without a parent."""
        return None

    def leave(self, **tensors: Tensor) -> None:
        """Keeps what the layer leaves to descendants, by names."""


class Expand(torch.autograd.Function):
    """Rows [P, H] of values [T, H] by index [P], zeros where it is T. The gradients of rows that share a token are
    summed in float32 at least, and rounded once."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_tokens = len(values)
        return torch.cat([values, values.new_zeros(1, values.shape[1])]).index_select(0, index)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        dtype = torch.promote_types(grad.dtype, torch.float32)
        sums = grad.new_zeros(ctx.num_tokens + 1, grad.shape[1], dtype=dtype)
        for part, rows in zip(index.split(_ROWS_AT_ONCE), grad.split(_ROWS_AT_ONCE)):
            sums.index_add_(0, part, rows.to(dtype))
        return sums[:ctx.num_tokens].to(grad.dtype), None


_ROWS_AT_ONCE = 4096  # so that copies in float32 stay small
