# SPDX-License-Identifier: Apache-2.0
"""Models of DistributedDataParallel, and those whose heads alone are divided, over one step."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .earlier import EarlierGradients


class Replicated:
    """A model that every rank of `group` has alike. Its own reductions rest during a step, at whose end gradients are summed over
    the group. group: of a model that is not of DistributedDataParallel."""

    def __init__(self, model: torch.nn.Module, group: Any = None) -> None:
        self.model: Any = model
        self._reduces_itself = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        self._group = self.model.process_group if self._reduces_itself else group
        self._earlier = EarlierGradients()
        self._saved = (True, True)

    def description(self) -> str:
        """What has to be the same on all ranks, as text."""
        said = " ".join(f"{name} {parameter.shape} {parameter.dtype} {parameter.requires_grad}"
                        for name, parameter in self.model.named_parameters())  # fmt: skip
        return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()

    def begin(self, is_gathered: bool, trace: Any = None) -> None:
        if self._reduces_itself:
            self._saved = self.model.require_backward_grad_sync, self.model.require_forward_param_sync
            # Without the second, a forward sends buffers, as many times as a rank has micro-batches.
            self.model.require_backward_grad_sync = self.model.require_forward_param_sync = False
        self._earlier = EarlierGradients(self._parameters())

    def present(self) -> list[bool]:
        return [parameter.grad is not None for parameter in self._parameters()]

    def reduce(self, wanted: Sequence[bool]) -> None:
        works = []
        for parameter, is_wanted in zip(self._parameters(), wanted):
            if is_wanted:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                own = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                works.append(dist.all_reduce(own, group=self._group, async_op=True))
        for work in works:
            work.wait()
        self._earlier.add_back()
        self._restore()

    def abandon(self) -> None:
        self._earlier.put_back()
        self._restore()

    def _restore(self) -> None:
        if self._reduces_itself:
            self.model.require_backward_grad_sync, self.model.require_forward_param_sync = self._saved
        self._earlier = EarlierGradients()

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]
