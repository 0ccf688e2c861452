# SPDX-License-Identifier: Apache-2.0
"""What a head asks of a patched backbone: hidden states of distinct tokens in place of those of all rows."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..trees import Layout
from .rows import Rows
from .run import Expand

_of_thread = threading.local()  # .asked: the Asked of the forward that is under way in this thread


class Asked:
    """Asks for the hidden states of the distinct tokens at some places of a batch.

    places     [W] int64: among the B * S of the batch
    held_back  the backbone gives its caller no hidden states [1, 0, H]; the head takes them from here

    After the forward pass of the backbone:

    values     [T, H]: of the forest
    index      [B * S] int64: the token at each place, T where there is padding
    hidden     [P, H]: of the distinct tokens at the places, in ascending order; zeros for padding, which is the last
    found      [W] int64: which of the P stands at each of the places
    """

    def __init__(self, backbone: Any, places: NDArray[np.int64], *, held_back: bool = False) -> None:
        self.backbone, self.places, self.held_back = backbone, places, held_back
        self.forest: tuple[Rows, Layout] | None = None  # of the batch, where it is known before
        self.output_class: Any = None  # of the backbone

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def answer(self, values: Tensor, index: NDArray[np.int64], output_class: Any) -> Tensor:
        """What the backbone gives as its hidden states, [1, P, H]."""
        self.values, self.index, self.output_class = values, index, output_class
        self.hidden = self._selected()
        return (self.hidden[:0] if self.held_back else self.hidden).unsqueeze(0)

    def _selected(self) -> Tensor:
        distinct, self.found = np.unique(self.index[self.places], return_inverse=True)
        num_tokens = len(self.values)
        if np.array_equal(distinct, np.arange(num_tokens)):
            return self.values
        has_padding = len(distinct) > 0 and distinct[-1] == num_tokens
        tokens = torch.from_numpy(distinct[:-1] if has_padding else distinct).to(self.values.device)
        hidden = self.values.index_select(0, tokens)
        return torch.cat([hidden, hidden.new_zeros(1, hidden.shape[1])]) if has_padding else hidden


class AskedTokens(Asked):
    """Asks for the hidden states of given tokens [P] int64 of the forest, which may stand there more than once."""

    def __init__(self, backbone: Any, tokens: NDArray[np.int64], forest: tuple[Rows, Layout]) -> None:
        super().__init__(backbone, np.empty(0, np.int64))
        self._tokens, self.forest = tokens, forest

    def _selected(self) -> Tensor:
        tokens = torch.from_numpy(self._tokens).to(self.values.device)
        hidden: Tensor = Expand.apply(self.values, tokens)  # type: ignore[no-untyped-call]
        return hidden


class Given:
    """Has the backbone give hidden states [N, H] that are there already, instead of running."""

    def __init__(self, backbone: Any, hidden: Tensor, output_class: Any) -> None:
        self.backbone, self._hidden, self._output_class = backbone, hidden, output_class

    def output(self) -> Any:
        return self._output_class(last_hidden_state=self._hidden.unsqueeze(0))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def asked_of(backbone: Any) -> "Asked | Given | None":
    """What this thread asks of `backbone` at the moment."""
    asked: Asked | Given | None = getattr(_of_thread, "asked", None)
    return asked if asked is not None and asked.backbone is backbone else None


@contextlib.contextmanager
def asking(asked: "Asked | Given | None") -> Iterator[None]:
    """Inside, this thread asks for that; None: for nothing, whatever is asked outside."""
    before = getattr(_of_thread, "asked", None)
    _of_thread.asked = asked
    try:
        yield
    finally:
        _of_thread.asked = before


def index_of(rows: Rows, layout: Layout, size: int) -> NDArray[np.int64]:
    """[size] int64: the token of the forest at each place of a batch, one past the end for padding."""
    index = np.full(size, layout.num_tokens, np.int64)
    index[rows.places] = layout.paths()[1]
    return index
