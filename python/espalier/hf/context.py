# SPDX-License-Identifier: Apache-2.0
"""Context between the micro-batches of a partition: what layers read of ancestors and leave to descendants."""

import contextlib
import copy

import torch

from ..errors import Unsupported
from .run import TreeRun


class Frame:
    """What the layers of one micro-batch leave to its descendants, who read it as leaf tensors; the gradients that
    their backward passes leave there are summed, in float32 at least. Knows nothing of what the tensors mean.

    live            by (layer, name), as the forward pass made them
    leaves          the same detached
    wants_gradients whether there will be backward passes; then leaves require gradients"""

    def __init__(self, live, wants_gradients):
        self.leaves = {key: tensor.detach().requires_grad_(wants_gradients) for key, tensor in live.items()}
        self._sums = {}

    def collect(self):
        """Call after each backward pass of a descendant."""
        for key, leaf in self.leaves.items():
            if leaf.grad is None or leaf.dtype in (torch.float32, torch.float64):  # summed in place by autograd
                continue
            wide, leaf.grad = leaf.grad.float(), None
            self._sums[key] = self._sums[key].add_(wide) if key in self._sums else wide

    def seeds(self, live):
        """(tensors, gradients): those of `live`, made by a forward pass with a graph, to which descendants have left
        gradients."""
        tensors, gradients = [], []
        for key, leaf in self.leaves.items():
            gradient = self._sums.get(key, leaf.grad)
            if gradient is not None and live[key].requires_grad:
                tensors.append(live[key])
                gradients.append(gradient.to(live[key].dtype))
        return tensors, gradients

    def free(self):
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

    def __init__(self, layout, device, backend, *, prev, reads, frames, parent, ends):
        super().__init__(layout, device, backend)
        self.prev = torch.from_numpy(prev)
        self.ends = None if ends is None else torch.from_numpy(ends)
        self._blocks, self._positions = torch.from_numpy(reads.blocks), torch.from_numpy(reads.positions)
        self._frames, self._parent = frames, parent
        self._live = {}  # what layers leave; None once the forward pass is over, so that recomputation leaves nothing
        self._layer = None

    def at(self, layer):
        """The same as the layer sees it."""
        view = copy.copy(self)
        view._layer = layer
        return view

    def take(self):
        """What the layers have left, by (layer, name). Call once after the forward pass."""
        live, self._live = self._live, None
        return live

    def release(self):
        """Lets the frames go, whoever still holds the run."""
        self._frames, self._parent = (), None

    def attention_context(self):
        if not self._frames:
            return {}
        leaves = [[self._left_by(frame, name) for frame in self._frames] for name in ("key", "value")]
        return {"context_k": leaves[0], "context_v": leaves[1], "context_blocks": self._blocks,
                "context_positions": self._positions}  # fmt: skip

    def inherited(self, name):
        return None if self._parent is None else self._left_by(self._parent, name)

    def leave(self, **tensors):
        if self.ends is None:
            return
        self._check_layer()
        if self._live is not None:
            self._live.update({(self._layer, name): tensor for name, tensor in tensors.items()})

    def _left_by(self, frame, name):
        self._check_layer()
        return frame.leaves[self._layer, name]

    def _check_layer(self):
        if self._layer is None:
            raise Unsupported("espalier.Step: expected layers that say by a layer_idx which they are, received a call "
                              "of a layer outside of a step, or of one without")  # fmt: skip


@contextlib.contextmanager
def naming_layers(backbone):
    """Inside, attention and recurrent mixers of `backbone` are handed the view of their layer, in recomputation as
    well."""

    def name_layer(module, args, kwargs):
        run = kwargs.get("espalier_tree")
        return None if run is None else (args, {**kwargs, "espalier_tree": run.at(module.layer_idx)})

    layers = [module for module in backbone.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    hooks = [module.register_forward_pre_hook(name_layer, with_kwargs=True) for module in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
