# SPDX-License-Identifier: Apache-2.0
"""Context between the micro-batches of a partition: what layers read of ancestors and leave to descendants."""

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import Unsupported
from ..trees import Layout
from .run import Contexts, Shard, TreeRun

Left: TypeAlias = dict[tuple[int, str], Tensor]  # what layers leave, by layer and name


@dataclass(frozen=True)
class ContextReads:
    """What one micro-batch reads of its ancestors."""

    ancestors: tuple[int, ...]  # micro-batches, ascending
    blocks: NDArray[np.int64]  # [P, 5], as ops.tree_attention has them; segment s is ancestors[s]
    positions: NDArray[np.int64]  # [P]: of each block's first key


class Frame:
    """What the layers of one micro-batch leave to its descendants, who read it as leaf tensors; the gradients that
    their backward passes leave there are summed, in float32 at least. Knows nothing of what the tensors mean.

    live            by (layer, name), as the forward pass made them
    leaves          the same detached
    wants_gradients whether there will be backward passes; then leaves require gradients"""

    def __init__(self, live: Left, wants_gradients: bool) -> None:
        self.leaves = {key: tensor.detach().requires_grad_(wants_gradients) for key, tensor in live.items()}
        self._sums: Left = {}

    def collect(self) -> None:
        """Call after each backward pass of a descendant."""
        for key, leaf in self.leaves.items():
            if leaf.grad is None or leaf.dtype in (torch.float32, torch.float64):  # summed in place by autograd
                continue
            wide, leaf.grad = leaf.grad.float(), None
            self._sums[key] = self._sums[key].add_(wide) if key in self._sums else wide

    def seeds(self, live: Left) -> tuple[list[Tensor], list[Tensor]]:
        """(tensors, gradients): those of `live`, made by a forward pass with a graph, to which descendants have left
        gradients."""
        tensors, gradients = [], []
        for key, leaf in self.leaves.items():
            gradient = self._sums.get(key, leaf.grad)
            if gradient is not None and live[key].requires_grad:
                tensors.append(live[key])
                gradients.append(gradient.to(live[key].dtype))
        return tensors, gradients

    def free(self) -> None:
        """Lets the memory go, though graphs that the user still holds know the leaves."""
        for leaf in self.leaves.values():
            leaf.data, leaf.grad = leaf.new_empty(0), None
        self.leaves, self._sums = {}, {}


class ContextRun(TreeRun):
    """A TreeRun that goes on from other micro-batches.

    prev     [T] int32: -2 - n where a token continues the parent's end n
    reads    ContextReads; `frames` are those of its ancestors, in that order, and `parent` that of the parent, or None
    ends     [C] int64 on the CPU: tokens after which others continue; None where nobody reads this micro-batch
    """

    def __init__(self, layout: Layout | Shard, device: torch.device, backend: str, *, prev: NDArray[np.int32],
                 reads: ContextReads | None, frames: Sequence[Frame], parent: Frame | None,
                 ends: NDArray[np.int64] | None) -> None:  # fmt: skip
        super().__init__(layout, device, backend)
        self.prev = torch.from_numpy(prev)
        self.ends = None if ends is None else torch.from_numpy(ends)
        if reads is not None:
            self._blocks, self._positions = torch.from_numpy(reads.blocks), torch.from_numpy(reads.positions)
        self._frames, self._parent = frames, parent
        # What layers leave; None once the forward pass is over, so that recomputation leaves nothing.
        self._live: Left | None = {}
        self._layer: int | None = None

    def at(self, layer: int) -> "ContextRun":
        """The same as the layer sees it."""
        view = copy.copy(self)
        view._layer = layer
        return view

    def take(self) -> Left:
        """What the layers have left, by (layer, name). Call once after the forward pass."""
        live, self._live = self._live, None
        assert live is not None  # taken once
        return live

    def release(self) -> None:
        """Lets the frames go, whoever still holds the run."""
        self._frames, self._parent = (), None

    def attention_contexts(self, _key: Tensor, _value: Tensor, _window: int, _chunk: int) -> Contexts:
        if not self._frames:
            return [dict]
        leaves = [[self._left_by(frame, name) for frame in self._frames] for name in ("key", "value")]
        return [lambda: {"context_k": leaves[0], "context_v": leaves[1], "context_blocks": self._blocks,
                         "context_positions": self._positions}]  # fmt: skip

    def inherited(self, name: str) -> Tensor | None:
        return None if self._parent is None else self._left_by(self._parent, name)

    def leave(self, **tensors: Tensor) -> None:
        if self.ends is None:
            return
        layer = self._checked_layer()
        if self._live is not None:
            is_again = torch._C._current_graph_task_id() != -1  # for a backward that has begun
            if not is_again and any((layer, name) in self._live for name in tensors):
                raise Unsupported(f"espalier.Step: expected layers that run once, received layer {layer} twice in a "
                                  'micro-batch; plan with strategy="tree-packing"')  # fmt: skip
            self._live.update({(layer, name): tensor for name, tensor in tensors.items()})

    def _left_by(self, frame: Frame, name: str) -> Tensor:
        return frame.leaves[self._checked_layer(), name]

    def _checked_layer(self) -> int:
        if self._layer is None:
            raise Unsupported("espalier.Step: expected layers that say by a layer_idx which they are, received a call "
                              "of a layer outside of a step, or of one without")  # fmt: skip
        return self._layer


@contextlib.contextmanager
def naming_layers(backbone: Any) -> Iterator[None]:
    """Inside, attention and recurrent mixers of `backbone` are handed the view of their layer, in recomputation as
    well."""

    def name_layer(module: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        run = kwargs.get("espalier_tree")
        return None if run is None else (args, {**kwargs, "espalier_tree": run.at(module.layer_idx)})

    with contextlib.ExitStack() as hooks:
        for module in backbone.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                hooks.enter_context(module.register_forward_pre_hook(name_layer, with_kwargs=True))
        yield
